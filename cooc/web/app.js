// The page: what is looked for on one side, what was found on the other. It speaks to the REST API and to nothing else.

import { Problem, call, onLogin, search, thumbnail, url } from "./api.js";
import { BoxEditor } from "./box.js";
import { Compare } from "./compare.js";

const $ = (id) => document.getElementById(id);
const PAGE = 30; // results asked for at once

const state = {
  query: null, // { pictures: [{ blob or id, url, width, height, box }], active }
  matches: [], // all that are shown
  next: null, // where the next results begin; null if there are none
  asking: null, // AbortController of the search under way
};
const visited = []; // queries, so that the browser's back button brings them back

// --- asking ----------------------------------------------------------------------------------------------------------

function options() {
  return {
    folder: $("folder").value,
    taken_from: $("from").value,
    taken_to: $("to").value,
    expand: $("expand").checked ? "alpha" : "",
    rerank: $("rerank").checked ? "superglobal" : "",
    verify: $("verify").checked ? "" : "false", // by default it is done where it can be
  };
}

function ask(query, remember = true) {
  state.query = query;
  if (remember) {
    visited.push(query);
    const [first] = query.pictures;
    history.pushState(visited.length - 1, "", first.id ? `#${first.id}` : "#photo");
  }
  document.body.classList.add("searching");
  $("welcome").hidden = true;
  $("query").hidden = false;
  showQuery();
  refresh();
}

let timer;
function refreshSoon() {
  clearTimeout(timer);
  timer = setTimeout(refresh, 250);
}

function refresh() {
  clearTimeout(timer);
  state.matches = [];
  state.next = 0;
  $("notice").hidden = true;
  $("grid").replaceChildren(...Array.from({ length: 12 }, waitingCard));
  say(state.query ? "Searching …" : "");
  return load(true);
}

// The next results, or, where nothing is looked for yet, the next pictures of the collection.
async function load(first = false) {
  if (state.next === null || (!first && state.asking)) return;
  state.asking?.abort();
  const asking = new AbortController();
  state.asking = asking;
  const grid = $("grid");
  grid.setAttribute("aria-busy", "true");
  try {
    const found = state.query ? await results(asking.signal) : await collection(asking.signal, first);
    if (first) grid.replaceChildren();
    for (const match of found) {
      const before = state.matches.at(-1);
      if (before?.verified && !match.verified) grid.append(...divider());
      grid.append(card(match, state.matches.length));
      state.matches.push(match);
    }
    if (!state.matches.length) nothing();
  } catch (error) {
    if (error.name === "AbortError") return;
    if (first) grid.replaceChildren();
    state.next = null;
    say("");
    problem(error);
  }
  if (state.asking !== asking) return;
  state.asking = null;
  grid.removeAttribute("aria-busy");
  if (state.next !== null && nearEnd()) load();
}

async function results(signal) {
  const busy = (seconds) => say(`The server is busy; trying again in ${seconds} s …`);
  const offset = state.next;
  const found = await search(state.query, { ...options(), k: PAGE, offset }, signal, busy);
  state.next = found.next_offset;
  if (!offset) {
    const any = found.matches.length;
    const first = found.checked && !found.no_match ? "What shows the same thing first" : "Most similar pictures first";
    say(any ? `${first}, in ${found.seconds.toFixed(2)} s.` : "");
    if (found.no_match && any) noMatch(found.checked);
  }
  return found.matches;
}

async function collection(signal, first) {
  const after = first ? "" : state.next;
  const found = await call("images", { query: { limit: PAGE, after, folder: $("folder").value }, signal });
  state.next = found.next_after;
  return found.pictures;
}

// --- showing ---------------------------------------------------------------------------------------------------------

function card(match, at) {
  const element = $("card").content.firstElementChild.cloneNode(true);
  const { width, height, path } = match;
  element.style.setProperty("--ratio", Math.min(Math.max(width / height, 0.6), 2.4).toFixed(4));
  const image = element.querySelector("img");
  image.src = thumbnail(match.id, devicePixelRatio > 1.5 || width > 2 * height ? 640 : 320);
  image.addEventListener("error", () => element.classList.add("gone"));
  const mark = element.querySelector(".mark");
  mark.textContent = said(match);
  mark.classList.toggle("verified", Boolean(match.verified));
  const [by, why] = element.querySelectorAll("button");
  by.title = path;
  by.setAttribute("aria-label", `Search by ${path}${mark.textContent && `, ${mark.textContent}`}`);
  by.addEventListener("click", () => searchBy(match));
  why.setAttribute("aria-label", `Why is ${path} similar?`);
  const { pictures, active } = state.query ?? {};
  why.addEventListener("click", () => compare.open(pictures[match.verified ? match.query_picture : active], state.matches, at));
  return element;
}

// What may be said of a result: vectors alone show that it is similar, never that it is the same.
function said({ score, verified, agreement }) {
  if (score == null) return ""; // a picture of the collection, nothing was looked for
  return verified ? `${agreement.inliers} points agree` : `similar ${score.toFixed(2)}`;
}

// The row above it is filled up, so that its last picture does not grow over all of it.
function divider() {
  const item = (className, textContent) => Object.assign(document.createElement("li"), { className, textContent });
  const filler = item("filler", "");
  filler.ariaHidden = "true";
  return [filler, item("divider", "Merely similar")];
}

function waitingCard(_, i) {
  const element = document.createElement("li");
  element.className = "card waiting";
  element.style.setProperty("--ratio", [1.5, 0.75, 1.33, 1][i % 4]);
  return element;
}

function queryBy({ id, width, height }) {
  return { pictures: [{ id, width, height, url: thumbnail(id, 1280), box: null }], active: 0 };
}

function searchBy(match) {
  ask(queryBy(match));
  $("results").focus({ preventScroll: true });
  scrollTo({ top: 0 });
}

function showQuery() {
  const { pictures, active } = state.query;
  const picture = pictures[active];
  const image = document.createElement("img");
  image.alt = "What is looked for";
  image.draggable = false;
  image.src = picture.url;
  image.addEventListener("load", () => {
    picture.width ??= image.naturalWidth;
    picture.height ??= image.naturalHeight;
    $("canvas").style.setProperty("--ratio", picture.width / picture.height);
    editor.edit(picture);
  });
  image.addEventListener("error", () => {
    const text = document.createElement("p");
    text.className = "unseen quiet";
    text.textContent = "This browser cannot show this kind of picture. The search works all the same.";
    $("canvas").replaceChildren(text);
    $("hint").textContent = "";
  });
  $("canvas").replaceChildren(image);
  editor.edit(null);
  $("strip").hidden = pictures.length < 2;
  $("strip").replaceChildren(...pictures.map((one, i) => {
    const button = document.createElement("button");
    button.type = "button";
    button.setAttribute("aria-pressed", i === active);
    button.setAttribute("aria-label", `Picture ${i + 1} of ${pictures.length}`);
    const small = document.createElement("img");
    small.src = one.url;
    small.alt = "";
    button.append(small);
    button.addEventListener("click", () => { state.query.active = i; showQuery(); });
    return button;
  }));
  $("add").hidden = Boolean(pictures[0].id);
  boxChanged(false);
}

function boxChanged(again = true) {
  const box = state.query.pictures[state.query.active].box;
  $("whole").hidden = !box;
  $("hint").textContent = box
    ? "Searching for what is in the box. Move it, or drag its corners."
    : "Drag over the picture to search for a part of it.";
  if (again) refreshSoon();
}

function say(text) { $("summary").textContent = text; }

function notice(title, lines, buttons = [], kind = "") {
  const box = $("notice");
  const heading = document.createElement("b");
  heading.textContent = title;
  const list = document.createElement("ul");
  list.append(...lines.map((line) => Object.assign(document.createElement("li"), { textContent: line })));
  const row = document.createElement("div");
  row.className = "buttons";
  row.append(...buttons.map(([text, action]) => {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: text });
    button.addEventListener("click", action);
    return button;
  }));
  box.className = `notice ${kind}`;
  box.replaceChildren(heading, ...(lines.length ? [list] : []), ...(buttons.length ? [row] : []));
  box.hidden = false;
}

const filtered = () => Boolean($("folder").value || $("from").value || $("to").value);
const clear = ["Clear the filters", clearFilters];

function noMatch(checked) {
  const tips = ["Draw a box around the thing itself.", "Try another photo of it, or add one."];
  if (filtered()) tips.unshift("Look in the whole collection: there are filters.");
  const title = checked
    ? "Nothing found: no picture agrees with yours in its details. The nearest are merely similar."
    : "Nothing in this collection seems to show the same thing. These pictures are merely similar.";
  notice(title, tips, filtered() ? [clear] : []);
}

function nothing() {
  say("");
  if (filtered()) notice("No picture passes the filters.", [], [clear]);
  else notice("This collection is empty.", ["Index a folder: cooc index FOLDER"]);
}

function problem(error) {
  const again = ["Try again", refresh];
  const tips = error.status === 413 ? ["Draw on a smaller version of the photo, or scale it down."] : [];
  notice(error instanceof Problem ? error.message : `Something went wrong: ${error.message}`, tips, [again], "problem");
}

// --- photos that are given -------------------------------------------------------------------------------------------

function given(files, join = false) {
  const blobs = [...files].filter((one) => one.type.startsWith("image/") || /\.(heic|heif|avif|tiff?)$/i.test(one.name));
  if (!blobs.length) {
    if (files.length) notice("This is no picture.", ["Choose a photo: JPEG, PNG, WebP, HEIC, ..."], [], "problem");
    return;
  }
  const pictures = blobs.map((blob) => ({ blob, url: URL.createObjectURL(blob), box: null }));
  const before = join && state.query && !state.query.pictures[0].id ? state.query.pictures : [];
  ask({ pictures: [...before, ...pictures], active: before.length });
}

let joining = false;
$("file").addEventListener("change", (event) => {
  given(event.target.files, joining);
  event.target.value = "";
});
for (const [button, join] of [["choose", false], ["add", true]]) {
  $(button).addEventListener("click", () => { joining = join; $("file").click(); });
}
addEventListener("paste", (event) => given(event.clipboardData.files));
addEventListener("dragover", (event) => {
  event.preventDefault();
  document.body.classList.toggle("dropping", event.dataTransfer.types.includes("Files"));
});
addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("dropping");
});
addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dropping");
  given(event.dataTransfer.files);
});

// --- filters ---------------------------------------------------------------------------------------------------------

// The menu holds the way down to the chosen folder and the folders below it: never all of them.
async function fillFolders() {
  const menu = $("folder");
  const chosen = menu.value;
  const { folders, complete } = await call("folders", { query: { below: chosen } });
  const way = chosen.split("/").map((_, i, parts) => parts.slice(0, i + 1).join("/")).filter(Boolean);
  const entries = [["", "All folders"], ...way.map((path) => [path, path]), ...folders.map(({ path, pictures }) => [path, `${path} (${pictures}) ›`])];
  menu.replaceChildren(...entries.map(([value, text]) => new Option(text, value, false, value === chosen)));
  if (!complete) menu.append(Object.assign(new Option("and more"), { disabled: true }));
}

function clearFilters() {
  for (const id of ["folder", "from", "to"]) $(id).value = "";
  fillFolders().catch(problem);
  refresh();
}

$("folder").addEventListener("change", () => {
  fillFolders().catch(problem);
  refresh();
});
for (const id of ["from", "to", "verify", "expand", "rerank"]) $(id).addEventListener("change", refresh);
$("whole").addEventListener("click", () => {
  state.query.pictures[state.query.active].box = null;
  editor.show();
  boxChanged();
});

// --- the rest --------------------------------------------------------------------------------------------------------

const nearEnd = () => $("more").getBoundingClientRect().top < innerHeight + 800;
new IntersectionObserver(([entry]) => entry.isIntersecting && load(), { rootMargin: "800px" }).observe($("more"));

addEventListener("popstate", (event) => {
  if (event.state !== null && visited[event.state]) ask(visited[event.state], false);
  else begin();
});

function begin() {
  const id = location.hash.slice(1);
  if (/^[0-9a-f]{32}$/.test(id)) {
    call(`images/${id}`).then((picture) => ask(queryBy(picture), false), problem);
    return;
  }
  state.query = null;
  document.body.classList.remove("searching");
  $("welcome").hidden = false;
  $("query").hidden = true;
  refresh();
}

let session; // one question, however many requests were refused
onLogin(() => session ??= new Promise(() => { // the page begins again with it
  $("login").showModal();
  $("login").addEventListener("cancel", (event) => event.preventDefault());
  $("login-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      await call("session", post({ token: $("token").value }));
      location.reload();
    } catch (error) {
      $("login-problem").textContent = error.message;
    }
  });
}));

const post = (value) => ({ method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(value) });

$("update").addEventListener("click", async () => {
  try {
    await call("indexing", post({ folder: $("update").dataset.folder }));
    followIndexing();
  } catch (error) {
    problem(error);
  }
});

function followIndexing() {
  const events = new EventSource(url("indexing/events"));
  $("update").disabled = true;
  events.addEventListener("progress", (event) => {
    const { state: now, done, total, message } = JSON.parse(event.data);
    $("collection").textContent = now === "running" ? `Indexing: ${done} of ${total ?? "…"} pictures` : (message ?? "");
    if (now === "running" || now === "stopping") return;
    events.close();
    $("update").disabled = false;
    showStatus().then(refresh);
  });
}

async function showStatus() {
  const status = await call("status");
  $("collection").textContent = `${status.images.toLocaleString("en")} pictures in ${status.name}`;
  $("verifying").hidden = !status.features;
  $("update").hidden = !status.folders.length;
  $("update").dataset.folder = status.folders[0] === "." ? "" : status.folders[0] ?? "";
}

const editor = new BoxEditor($("canvas"), () => boxChanged());
const compare = new Compare(searchBy);
if (matchMedia("(max-width: 760px)").matches) $("options").open = false;
showStatus().catch(problem);
fillFolders().catch(() => {}); // status has said it
begin();
