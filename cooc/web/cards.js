// Pictures as cards: what they show, what they are called and where they lie, and what may be said of them.

import { thumbnail } from "./api.js";

const $ = (id) => document.getElementById(id);
const MARKS = { right: "\u2713 marked right", wrong: "\u2717 marked wrong" };

// ordered: do the scores fall from card to card? Numbers out of order would only confuse.
export function makeCard(match, { ordered, marked }) {
  const element = $("card").content.firstElementChild.cloneNode(true);
  const { width, height, path } = match;
  element.dataset.id = match.id;
  element.style.setProperty("--ratio", Math.min(Math.max(width / height, 0.6), 2.4).toFixed(4));
  const image = element.querySelector("img");
  image.src = thumbnail(match.id, devicePixelRatio > 1.5 || width > 2 * height ? 640 : 320);
  image.addEventListener("error", () => element.classList.add("gone"));
  const mark = element.querySelector(".mark");
  mark.textContent = said(match, ordered);
  mark.classList.toggle("verified", Boolean(match.verified || match.keep));
  const [by, why] = element.querySelectorAll("button");
  by.title = path;
  by.setAttribute("aria-label", `Search by ${path}${mark.textContent && `, ${mark.textContent}`}`);
  why.setAttribute("aria-label", `Why is ${path} similar?`);
  element.querySelector(".pick input").setAttribute("aria-label", `Select ${path}`);
  describe(element, match, marked);
  return element;
}

// The lines below the picture: they change when it is tagged or marked.
export function describe(element, { path, tags, width, height, bytes }, marked) {
  const at = path.lastIndexOf("/");
  const [name, where] = element.querySelector(".name").children;
  name.textContent = path.slice(at + 1);
  const size = bytes && `${width} x ${height}, ${inUnits(bytes)}`;
  where.textContent = [size, path.slice(0, Math.max(at, 0)), ...tags.map((tag) => `#${tag}`), MARKS[marked]].filter(Boolean).join(" \u00b7 ");
  element.querySelector(".name").title = `${path}${tags.length ? `\n${tags.join(", ")}` : ""}`;
  element.classList.toggle("right", marked === "right");
  element.classList.toggle("wrong", marked === "wrong");
}

const inUnits = (bytes) => (bytes < 1e6 ? `${Math.ceil(bytes / 1e3)} kB` : `${(bytes / 1e6).toFixed(1)} MB`);

// What may be said of a result: vectors alone show that it is similar, never that it is the same.
function said({ score, verified, agreement, keep }, ordered) {
  if (keep) return `keep: ${keep}`;
  if (score == null) return ""; // a picture of the collection, nothing was looked for
  if (verified) return `${agreement.inliers} points agree`;
  return ordered ? `similar ${score.toFixed(2)}` : "similar";
}

// A line between pictures. The row above it is filled up, so that its last picture does not grow over all of it.
export function divider(text, ...more) {
  const item = (className, textContent) => Object.assign(document.createElement("li"), { className, textContent });
  const [filler, line] = [item("filler", ""), item("divider", text)];
  filler.ariaHidden = "true";
  line.append(...more);
  return [filler, line];
}

// Above a group of copies. onRest(): select all but the one to keep.
export function groupDivider({ pictures, name }, onRest) {
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: "Select the rest" });
  button.setAttribute("aria-label", `Select the rest of the copies of ${name}`);
  button.addEventListener("click", onRest);
  return divider(`${pictures.length} pictures`, button);
}

export function waitingCard(_, i) {
  const element = document.createElement("li");
  element.className = "card waiting";
  element.style.setProperty("--ratio", [1.5, 0.75, 1.33, 1][i % 4]);
  return element;
}
