// Query and match side by side, with the shares of the score over both.

import { explain, file, thumbnail } from "./api.js";
import { drawRamp, heatOver, place } from "./heat.js";

const $ = (id) => document.getElementById(id);

export class Compare {
  // onSearch(match): the person wants to search by it.
  constructor(onSearch) {
    this.dialog = $("compare");
    this.matches = [];
    this.at = 0;
    drawRamp($("ramp"));
    $("close").addEventListener("click", () => this.dialog.close());
    $("previous").addEventListener("click", () => this.show(this.at - 1));
    $("next").addEventListener("click", () => this.show(this.at + 1));
    $("heat").addEventListener("change", () => this.paint());
    $("by-this").addEventListener("click", () => {
      this.dialog.close();
      onSearch(this.matches[this.at]);
    });
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.dialog.close(); // the backdrop
    });
    this.dialog.addEventListener("close", () => this.asking?.abort());
    this.dialog.addEventListener("keydown", (event) => {
      if (event.key === "ArrowLeft") this.show(this.at - 1);
      if (event.key === "ArrowRight") this.show(this.at + 1);
    });
  }

  // picture: what was searched by; matches: all results shown so far.
  open(picture, matches, at) {
    this.picture = picture;
    this.matches = matches;
    this.dialog.showModal();
    this.show(at);
  }

  async show(at) {
    if (at < 0 || at >= this.matches.length) return;
    this.at = at;
    const match = this.matches[at];
    $("previous").disabled = at === 0;
    $("next").disabled = at === this.matches.length - 1;
    $("right-name").textContent = match.path;
    $("right-name").title = match.path;
    $("open-file").href = file(match.id);
    picture($("left"), this.picture.url, "What is looked for", this.picture);
    picture($("right"), thumbnail(match.id, 1280), match.path, match);
    if (this.picture.box) $("left").append(framed(this.picture.box, this.picture, "asked"));
    this.explanation = null;
    this.paint();
    $("why").textContent = "Taking the score apart …";
    this.asking?.abort();
    this.asking = new AbortController();
    try {
      this.explanation = await explain(this.picture, match.id, this.asking.signal);
      $("why").textContent = sentence(this.explanation, match);
      this.paint();
    } catch (error) {
      if (error.name !== "AbortError") $("why").textContent = `It could not be explained: ${error.message}`;
    }
  }

  paint() {
    const heat = $("heat").checked;
    const sides = { left: [this.explanation?.query, this.picture], right: [this.explanation?.match, this.matches[this.at]] };
    for (const [side, [shares, { width, height, box }]] of Object.entries(sides)) {
      const host = $(side);
      host.querySelectorAll(".clip, .here").forEach((old) => old.remove());
      host.classList.toggle("hot", Boolean(shares) && heat);
      if (!shares || !width) continue;
      if (heat) host.append(heatOver(shares, box ?? [0, 0, width, height], width, height));
      if (shares.box) {
        const here = framed(shares.box, { width, height }, "here");
        here.title = "Most of the score comes from here";
        host.append(here);
      }
    }
  }
}

function picture(host, source, alt, { width, height }) {
  host.style.setProperty("--ratio", width / height || 1);
  const image = document.createElement("img");
  image.src = source;
  image.alt = alt;
  host.replaceChildren(image);
}

function framed(box, { width, height }, kind) {
  const frame = document.createElement("div");
  frame.className = `frame ${kind}`;
  return place(frame, box, width, height);
}

function sentence({ score, exact, match: { box } }, { verified }) {
  const limit = verified ? "" : " It was not verified that both show the same thing.";
  const sum = exact ? "The shares of all places add up to it." : "Shares by the derivative, since this pooling is no sum.";
  const here = box ? " The frames hold most of them." : " No place speaks for it.";
  return `The similarity is ${score.toFixed(3)}. ${sum}${here}${limit}`;
}
