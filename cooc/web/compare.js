// Query and match side by side, with the shares of the score over both, and the points in which they agree.

import { explain, file, thumbnail } from "./api.js";
import { drawRamp, heatOver, place } from "./heat.js";
import { drawLines, pointsOver } from "./points.js";

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
    for (const id of ["heat", "points"]) $(id).addEventListener("change", () => this.paint());
    new ResizeObserver(() => this.join()).observe($("sides"));
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
    if (matches[at].verified) $("heat").checked = false; // what agrees says more, and both at once hide the pictures
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
      host.querySelectorAll(".clip, .here, .points").forEach((old) => old.remove());
      host.classList.toggle("hot", Boolean(shares) && heat);
      if (!shares || !width) continue;
      if (heat) host.append(heatOver(shares, box ?? [0, 0, width, height], width, height));
      if (shares.box && (heat || !this.explanation.agreement?.inliers)) {
        const here = framed(shares.box, { width, height }, "here");
        here.title = "Most of the score comes from here";
        host.append(here);
      }
    }
    const agreement = this.explanation?.agreement;
    const points = $("points").checked && agreement?.inliers ? this.explanation.points : [];
    $("pointing").hidden = !agreement?.inliers;
    if (points.length) {
      $("left").append(pointsOver(points.map(([x, y]) => [x, y]), agreement.query));
      $("right").append(pointsOver(points.map(([, , x, y]) => [x, y]), agreement.picture));
    }
    this.joined = points;
    this.join();
  }

  // The lines between the pictures, wherever these stand now.
  join() {
    const agreement = this.explanation?.agreement;
    drawLines($("lines"), $("left"), $("right"), this.joined ?? [], agreement);
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

function sentence({ score, exact, match: { box }, agreement, probability }, { verified }) {
  const percent = Math.min(Math.round(100 * probability), 99);
  const agreed = agreement?.inliers ? ` ${agreement.inliers} points agree` : "";
  const sure = agreed && verified ? `${agreed}: the same thing, ${percent} %.` : agreed && `${agreed}, which is too little to tell.`;
  const limit = verified ? sure : `${sure} It was not verified that both show the same thing.`;
  const sum = exact ? "The shares of all places add up to it." : "Shares by the derivative, since this pooling is no sum.";
  const here = box ? " The frames hold most of them." : " No place speaks for it.";
  return `The similarity is ${score.toFixed(3)}. ${sum}${here}${limit}`;
}
