// What is looked for: a picture with a box on it, and those that are joined with it.

import { Problem, preview } from "./api.js";
import { BoxEditor } from "./box.js";

const $ = (id) => document.getElementById(id);
const DRAW = matchMedia("(pointer: coarse)").matches ? "Press long on the picture, then drag" : "Drag over the picture";

export class QueryPane {
  // onChanged(): another part is looked for.
  constructor(onChanged) {
    const changed = () => {
      this.tell();
      onChanged();
    };
    this.editor = new BoxEditor($("canvas"), changed);
    $("part").addEventListener("click", () => this.editor.picture?.width && this.editor.put());
    $("whole").addEventListener("click", () => {
      this.picture.box = null;
      this.editor.show();
      changed();
    });
  }

  get picture() { return this.query.pictures[this.query.active]; }

  show(query) {
    this.query = query;
    const { pictures, active } = query;
    const picture = pictures[active];
    const image = document.createElement("img");
    image.alt = "What is looked for";
    image.draggable = false;
    image.src = picture.url;
    image.addEventListener("load", () => {
      picture.width ??= image.naturalWidth;
      picture.height ??= image.naturalHeight;
      $("canvas").style.setProperty("--ratio", picture.width / picture.height);
      this.editor.edit(picture);
    });
    image.addEventListener("error", () => this.showOtherwise(picture));
    $("canvas").replaceChildren(image);
    this.editor.edit(null);
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
      button.addEventListener("click", () => { query.active = i; this.show(query); });
      return button;
    }));
    $("add").hidden = Boolean(pictures[0].id);
    this.tell();
  }

  // HEIC and TIFF: the server shows them. What it cannot show either is broken.
  async showOtherwise(picture) {
    const now = () => this.picture === picture;
    try {
      if (!picture.blob || picture.seen) throw new Problem("This file is broken.", 422);
      Object.assign(picture, await preview(picture.blob), { seen: true });
      if (now()) this.show(this.query);
    } catch (error) {
      if (!now()) return;
      const textContent = error.status === 422 ? "This file is broken." : "There is no preview of this file.";
      $("canvas").replaceChildren(Object.assign(document.createElement("p"), { className: "unseen quiet", textContent }));
      $("hint").textContent = "";
    }
  }

  tell() {
    const { box } = this.picture;
    $("whole").hidden = !box;
    $("part").hidden = Boolean(box);
    $("hint").textContent = box ? "Searching for what is in the box. Move it, or drag its corners." : `${DRAW} to search for a part of it.`;
  }
}
