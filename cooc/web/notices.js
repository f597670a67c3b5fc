// What the page says: how a search went, what may help, what went wrong.

import { Problem } from "./api.js";
import { filtered } from "./filters.js";

const $ = (id) => document.getElementById(id);

export function say(text) { $("summary").textContent = text; }

export function notice(title, lines, buttons = [], kind = "") {
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

const clear = ["Clear the filters", () => $("clear").click()];

export function noMatch(checked) {
  const tips = ["Draw a box around the thing itself.", "Try another photo of it, or add one."];
  if (filtered()) tips.unshift("Look in the whole collection: there are filters.");
  const title = checked
    ? "Nothing found: no picture agrees with yours in its details. The nearest are merely similar."
    : "Nothing in this collection seems to show the same thing. These pictures are merely similar.";
  notice(title, tips, filtered() ? [clear] : []);
}

export function nothing(what) {
  say("");
  if (what) notice(what, filtered() ? ["Look in the whole collection: there are filters."] : [], filtered() ? [clear] : []);
  else if (filtered()) notice("No picture passes the filters.", [], [clear]);
  else notice("This collection is empty.", ["Index a folder: cooc index FOLDER"]);
}

// again(): try it once more; of no use for what is broken.
export function problem(error, again) {
  const buttons = again && error.status !== 422 ? [["Try again", again]] : [];
  const tips = error.status === 413 ? ["Draw on a smaller version of the photo, or scale it down."] : [];
  notice(error instanceof Problem ? error.message : `Something went wrong: ${error.message}`, tips, buttons, "problem");
}
