// The page: what is looked for on one side, what was found on the other. It speaks to the REST API and to nothing else.

import * as adding from "./adding.js";
import { ask as request, boxText, call, search, thumbnail } from "./api.js";
import { describe, divider, groupDivider, makeCard, waitingCard } from "./cards.js";
import { Compare } from "./compare.js";
import * as filters from "./filters.js";
import * as given from "./given.js";
import { fromLink, toLink } from "./link.js";
import * as lists from "./lists.js";
import "./login.js";
import { noMatch, nothing, problem as tell, say } from "./notices.js";
import { QueryPane } from "./query.js";
import { Selection } from "./selection.js";
import * as updating from "./updating.js";

const $ = (id) => document.getElementById(id);

const state = {
  query: null, // { pictures: [{ blob or id, url, width, height, box, sha256 }], active }
  asked: {}, // without a query: nothing for all pictures, { words: text } or { copies: "1" }
  matches: [], // all that are shown
  next: null, // where the next results begin; null if there are none
  asking: null, // AbortController of the search under way
  ordered: true, // do the scores fall from card to card? Not after re-ranking
  marks: new Map(), // of this search: path -> right or wrong
  kept: 0, // seconds for which the server keeps photos that it was sent
};
const visited = []; // queries, so that the browser's back button brings them back
const SWITCHES = { verify: true, thorough: false, expand: false, rerank: false }; // and their defaults

// --- asking ----------------------------------------------------------------------------------------------------------

function options() {
  return {
    ...filters.where(),
    expand: $("expand").checked ? "alpha" : "",
    rerank: $("rerank").checked ? "superglobal" : "",
    verify: $("verify").checked ? "" : "false", // by default it is done where it can be
    thorough: $("thorough").checked ? "true" : "",
  };
}

function ask(query, remember = true) {
  state.query = query;
  state.asked = {};
  if (remember) {
    visited.push(query);
    history.pushState(visited.length - 1, "", link());
  }
  document.body.classList.add("searching");
  $("welcome").hidden = true;
  $("query").hidden = false;
  pane.show(query);
  refresh();
}

// { copies: "1" }, { words: text } or {}.
function askFor(asked) {
  state.query = null;
  state.asked = asked;
  history.pushState(null, "", link() === "#" ? location.pathname : link());
  showCollection();
}

// What the address says of the search: the query, and all that is not as usual.
function link() {
  const switched = Object.entries(SWITCHES).filter(([id, usual]) => $(id).checked !== usual);
  return toLink(state.query, { ...filters.chosen(), ...state.asked, ...Object.fromEntries(switched.map(([id, usual]) => [id, usual ? "0" : "1"])) });
}

function keepLink() {
  const now = link();
  if (now !== (location.hash || "#")) history.replaceState(history.state, "", now === "#" ? location.pathname : now);
}

let timer;
function refreshSoon() {
  clearTimeout(timer);
  timer = setTimeout(refresh, 250);
}

function refresh() {
  clearTimeout(timer);
  keepLink();
  selection.set([]);
  state.matches = [];
  state.next = 0;
  state.ordered = true;
  $("notice").hidden = true;
  $("grid").replaceChildren(...Array.from({ length: 12 }, waitingCard));
  $("copies").setAttribute("aria-pressed", Boolean(state.asked.copies));
  $("rest").hidden = !state.asked.copies;
  $("words").value = state.asked.words ?? "";
  say(state.asked.copies ? "Comparing the pictures …" : state.query || state.asked.words ? "Searching …" : "");
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
    const found = state.query ? await results(asking.signal) : await listed(asking.signal);
    if (first) grid.replaceChildren();
    put(found);
    if (!state.matches.length && state.next === null) nothing(state.asked.copies && "There are no copies.");
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

function put(matches) {
  const grid = $("grid");
  for (const match of matches) {
    const before = state.matches.at(-1);
    if (before?.verified && !match.verified) grid.append(...divider("Merely similar"));
    if (match.group && match.group !== before?.group) {
      grid.append(...groupDivider(match.group, () => selection.add(lists.rest(match.group.pictures))));
    }
    grid.append(card(match));
    state.matches.push(match);
  }
}

async function results(signal) {
  const busy = (seconds) => say(`The server is busy; trying again in ${seconds} s …`);
  const offset = state.next;
  const found = await search(state.query, { ...options(), k: lists.PAGE, offset }, signal, busy);
  state.next = found.next_offset;
  const scores = found.matches.filter((one) => !one.verified).map((one) => one.score);
  state.ordered = (!offset || state.ordered) && scores.every((score, i) => !i || score <= scores[i - 1] + 1e-6);
  if (!offset) {
    const any = found.matches.length;
    const similar = `Most similar pictures first${state.ordered ? "" : ", re-ranked"}`;
    const first = found.checked && !found.no_match ? "What shows the same thing first" : similar;
    say(any ? `${first}, in ${found.seconds.toFixed(2)} s.` : "");
    if (found.no_match && any) noMatch(found.checked);
    found.uploads.forEach((sha256, i) => { state.query.pictures[i].sha256 = sha256; });
    if (state.kept) keepLink();
    await showMarks(signal);
  }
  for (const match of found.matches) match.marked = state.marks.get(match.path);
  return found.matches;
}

// What was marked before of this search. Several pictures joined are no query that a mark could name.
function marksBy() {
  const [first, ...others] = state.query?.pictures ?? [];
  const query = first?.id ?? first?.sha256;
  return query && !others.length ? { query, box: boxText(first.box) || null } : null;
}

async function showMarks(signal) {
  const by = selection.writable && marksBy();
  const found = by ? await call("marks", { query: by, signal }) : [];
  state.marks = new Map(found.map(({ path, mark }) => [path, mark]));
}

// Pictures that are gone: what follows begins elsewhere now.
function forget(ids, text) {
  state.asking?.abort();
  state.asking = null;
  $("grid").removeAttribute("aria-busy");
  const left = state.matches.filter((one) => !ids.has(one.id));
  if (!state.asked.copies && typeof state.next === "number") state.next -= state.matches.length - left.length;
  if (typeof state.next === "string") state.next = left.at(-1)?.id ?? "";
  state.matches = [];
  $("grid").replaceChildren();
  put(lists.withoutSingles(left, ids));
  say(text);
  $("results").focus({ preventScroll: true });
  if (nearEnd()) load();
  return changed();
}

// Where nothing is looked for: groups of copies, what words describe, or all pictures.
async function listed(signal) {
  const { copies, words } = state.asked;
  const [found, next] = await (copies ? lists.groups(state.next, signal) : words ? lists.byWords(words, state.next, signal) : lists.collection(state.next, signal));
  state.next = next;
  return found;
}

// --- showing ---------------------------------------------------------------------------------------------------------

function card(match) {
  const element = makeCard(match, { ordered: state.ordered, marked: match.marked });
  const [by, why] = element.querySelectorAll("button");
  by.addEventListener("click", () => searchBy(match));
  why.addEventListener("click", () => {
    const { pictures, active } = state.query;
    compare.open(pictures[match.verified ? match.query_picture : active], state.matches, state.matches.indexOf(match));
  });
  return element;
}

function redraw(match) {
  const element = document.querySelector(`.card[data-id="${match.id}"]`);
  if (element) describe(element, match, match.marked);
}

function queryBy({ id, width, height }, box = null) {
  return { pictures: [{ id, width, height, url: thumbnail(id, 1280), box }], active: 0 };
}

function searchBy(match) {
  ask(queryBy(match));
  $("results").focus({ preventScroll: true });
  scrollTo({ top: 0 });
}

const problem = (error) => tell(error, refresh);

function byPhotos(pictures, join) {
  const before = join && state.query && !state.query.pictures[0].id ? state.query.pictures : [];
  ask({ pictures: [...before, ...pictures], active: before.length });
}

$("copies").addEventListener("click", () => askFor(state.asked.copies ? {} : { copies: "1" }));
$("rest").addEventListener("click", () => selection.set(lists.rest(state.matches)));
$("by-words").addEventListener("submit", (event) => {
  event.preventDefault();
  askFor({ words: $("words").value.trim() });
});
for (const id of Object.keys(SWITCHES)) $(id).addEventListener("change", refresh);

// --- the rest --------------------------------------------------------------------------------------------------------

const nearEnd = () => $("more").getBoundingClientRect().top < innerHeight + 800;
new IntersectionObserver(([entry]) => entry.isIntersecting && load(), { rootMargin: "800px" }).observe($("more"));

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address says what is searched for, not where the focus is
  $("results").focus();
});

addEventListener("popstate", (event) => begin(visited[event.state]));

// What the address says: a search, or the collection, with all that is chosen. `before`: the search that it was.
async function begin(before) {
  const { id, photos, boxes, options: asked } = fromLink(location.hash);
  filters.set(asked);
  state.asked = asked.copies ? { copies: "1" } : asked.words ? { words: asked.words } : {};
  for (const [name, usual] of Object.entries(SWITCHES)) $(name).checked = name in asked ? asked[name] === "1" : usual;
  try {
    if (before) return ask(before, false);
    if (id) return ask(queryBy(await call(`images/${id}`), boxes[0]), false);
    if (photos.length) return ask({ pictures: await Promise.all(photos.map((name, i) => sentBefore(name, boxes[i]))), active: 0 }, false);
  } catch (error) {
    showCollection();
    return problem(error);
  }
  return showCollection();
}

async function sentBefore(sha256, box = null) {
  const blob = await (await request(`queries/${sha256}`)).blob();
  return { blob, sha256, url: URL.createObjectURL(blob), box };
}

function showCollection() {
  state.query = null;
  document.body.classList.remove("searching");
  $("welcome").hidden = Object.keys(state.asked).length > 0;
  $("query").hidden = true;
  return refresh();
}

async function showStatus() {
  const status = await call("status");
  $("collection").textContent = `${status.images.toLocaleString("en")} pictures in ${status.name}`;
  for (const id of ["verifying", "deeper"]) $(id).hidden = !status.features;
  state.kept = status.keep_seconds;
  if (state.kept) $("privacy").textContent = `It is sent to this server only, and kept in its memory for ${Math.ceil(state.kept / 60)} minutes.`;
  selection.writable = status.writable;
  $("by-words").hidden = !status.words;
  for (const id of ["update", "add-pictures"]) $(id).hidden = !status.writable;
  $("update").dataset.folder = status.folders[0] === "." ? "" : status.folders[0] ?? "";
}

const pane = new QueryPane(refreshSoon);
const compare = new Compare(searchBy);
const fillMenus = () => filters.fill().catch(() => {}); // status has said it
const changed = () => Promise.all([showStatus(), filters.fill()]).catch(problem);
const selection = new Selection({
  shown: () => state.matches, marksBy, onChanged: redraw, onTagged: fillMenus, onRemoved: forget, onProblem: problem,
});
filters.begin(refresh, problem);
given.begin(byPhotos);
updating.begin(() => changed().then(refresh), problem);
adding.begin(() => changed().then(() => state.query ?? refresh()));
if (matchMedia("(max-width: 760px)").matches) for (const id of ["options", "filters"]) $(id).open = false;
fillMenus();
showStatus().catch(problem).finally(() => state.query ?? begin()); // a photo may have been given meanwhile
