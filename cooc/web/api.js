// Talks to the REST API. Errors are `Problem`s, whose text is meant for people.

const BASE = "api/v1";
const TRIES = 4;

export class Problem extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// What to do when the server asks for its token: set by app.js, resolves when there is a session.
let login = () => Promise.reject(new Problem("This server wants a token.", 401));
export function onLogin(ask) { login = ask; }

// The answer in JSON.
export async function call(path, options) {
  const answer = await ask(path, options);
  return answer.status === 204 ? null : answer.json();
}

export const post = (value) => ({ method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(value) });

export async function ask(path, { query = {}, signal, onBusy, ...options } = {}) {
  const address = url(path, query);
  for (let attempt = 1; ; attempt++) {
    let answer;
    try {
      answer = await fetch(address, { signal, ...options });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Problem("The server cannot be reached. Is it still running?", 0);
    }
    if (answer.ok) return answer;
    if (answer.status === 401 && path !== "session") { await login(); continue; }
    const wait = Number(answer.headers.get("Retry-After"));
    if ([429, 503].includes(answer.status) && wait && attempt < TRIES) {
      onBusy?.(wait);
      await pause(1000 * wait, signal);
      continue;
    }
    throw new Problem(await detail(answer), answer.status);
  }
}

async function detail(answer) {
  try {
    return (await answer.json()).detail;
  } catch {
    return `The server answered with ${answer.status}.`;
  }
}

function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(new DOMException("", "AbortError"));
    });
  });
}

export function url(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== "" && value != null && value !== false);
  const text = new URLSearchParams(given).toString();
  return `${BASE}/${path}${text && "?"}${text}`;
}

export const thumbnail = (id, side) => url(`images/${id}/thumbnail`, { side });
export const file = (id) => url(`images/${id}/file`);
export const boxText = (box) => (box ? box.map((n) => n.toFixed(1)).join(",") : "");

// A picture that the browser cannot show, as one that it can, and its full size.
export async function preview(blob) {
  const body = new FormData();
  body.append("image", blob, "query");
  const answer = await ask("preview", { method: "POST", body });
  const [width, height] = answer.headers.get("Full-Size").split("x").map(Number);
  return { url: URL.createObjectURL(await answer.blob()), width, height };
}

// A query is a list of pictures: { blob } that were given, or one { id } of the index; each may have a box.
export function search(query, options, signal, onBusy) {
  const [first] = query.pictures;
  if (first.id) {
    return call(`images/${first.id}/similar`, { query: { ...options, box: boxText(first.box) }, signal, onBusy });
  }
  const body = new FormData();
  for (const picture of query.pictures) {
    body.append("image", picture.blob, "query");
    body.append("box", boxText(picture.box));
  }
  return call("search", { query: options, method: "POST", body, signal, onBusy });
}

export function explain(picture, match, signal) {
  const path = `images/${match}/explanation`;
  if (picture.id) return call(path, { query: { query: picture.id, box: boxText(picture.box) }, signal });
  const body = new FormData();
  body.append("image", picture.blob, "query");
  body.append("box", boxText(picture.box));
  return call(path, { method: "POST", body, signal });
}
