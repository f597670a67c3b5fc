// Several pictures: chosen by click, by Shift for a whole range, or by key; then downloaded, listed, tagged, marked or removed.
//
//   X           selects the picture that has the focus; Shift+X all from the last one to it
//   Ctrl+A      selects all that are shown, Escape none

import { ask, call, post } from "./api.js";

const $ = (id) => document.getElementById(id);

export class Selection {
  // shown(): the matches on the page; marksBy(): what marks belong to, { query, box }, or null; onChanged(match): redraw it.
  // onRemoved(ids): they are no longer in the index.
  constructor({ shown, marksBy, onChanged, onTagged, onRemoved, onProblem }) {
    Object.assign(this, { shown, marksBy, onChanged, onTagged, onRemoved, onProblem });
    this.ids = new Set();
    this.last = 0; // where a range begins
    this.writable = false;
    $("grid").addEventListener("click", (event) => this.click(event), true);
    addEventListener("keydown", (event) => this.key(event));
    $("all").addEventListener("click", () => this.set(this.shown().map((one) => one.id)));
    $("none").addEventListener("click", () => this.set([]));
    $("zip").addEventListener("click", () => this.download("images/zip", {}, "pictures.zip"));
    for (const format of ["csv", "json"]) {
      $(format).addEventListener("click", () => this.download("images/list", { format }, `pictures.${format}`));
    }
    for (const mark of ["right", "wrong"]) $(`mark-${mark}`).addEventListener("click", () => this.mark(mark));
    $("tagging").addEventListener("submit", (event) => {
      event.preventDefault();
      this.tag("add");
    });
    $("remove").addEventListener("click", () => this.askToRemove());
    $("removing").addEventListener("close", () => $("removing").returnValue && this.remove($("removing-files").checked));
    $("untag").addEventListener("click", () => $("tag-name").reportValidity() && this.tag("remove"));
  }

  // A click on a box, or, while some are selected or with a key held, on a picture.
  click(event) {
    const card = event.target.closest(".card");
    const box = event.target.closest(".pick");
    const picture = event.target.closest(".by");
    if (!card?.dataset.id || (!box && !picture)) return;
    if (picture && !this.ids.size && !event.shiftKey && !event.ctrlKey && !event.metaKey) return;
    if (box && event.target.tagName !== "INPUT") return; // the label passes it on to its box
    event.stopPropagation();
    if (picture) event.preventDefault();
    this.toggle(card, event.shiftKey);
  }

  key(event) {
    if ($("grid").getAttribute("aria-busy") || document.querySelector("dialog[open]")) return;
    const card = event.target.closest?.(".card");
    if (event.key === "Escape" && this.ids.size) this.set([]);
    else if (card?.dataset.id && event.key.toLowerCase() === "x" && !event.ctrlKey && !event.metaKey) this.toggle(card, event.shiftKey);
    else if (card && event.key === "a" && (event.ctrlKey || event.metaKey)) this.set(this.shown().map((one) => one.id));
    else return;
    event.preventDefault();
  }

  toggle(card, range) {
    const ids = this.shown().map((one) => one.id);
    const at = ids.indexOf(card.dataset.id);
    if (range) {
      const [from, to] = [Math.min(this.last, at), Math.max(this.last, at)];
      for (const id of ids.slice(from, to + 1)) this.ids.add(id);
    } else if (!this.ids.delete(card.dataset.id)) {
      this.ids.add(card.dataset.id);
    }
    this.last = at;
    this.show();
  }

  add(ids) { this.set([...this.ids, ...ids]); }

  set(ids) {
    this.ids = new Set(ids);
    this.show();
  }

  show() {
    for (const card of $("grid").querySelectorAll(".card[data-id]")) {
      const on = this.ids.has(card.dataset.id);
      card.classList.toggle("picked", on);
      card.querySelector(".pick input").checked = on;
    }
    const count = this.ids.size;
    if (!count && $("selection").contains(document.activeElement)) $("results").focus({ preventScroll: true });
    $("selection").hidden = !count;
    document.body.classList.toggle("selecting", count > 0);
    $("marking").hidden = !this.writable || !this.marksBy();
    for (const id of ["tagging", "taking-out"]) $(id).hidden = !this.writable;
    this.say(`${count} selected`);
  }

  say(text) { $("selected").textContent = text; }

  chosen() { return this.shown().filter((one) => this.ids.has(one.id)); }

  async download(path, query, name) {
    await this.doing("Packing …", async () => {
      const answer = await ask(path, { query, ...post({ ids: [...this.ids] }) });
      const address = URL.createObjectURL(await answer.blob());
      Object.assign(document.createElement("a"), { href: address, download: name }).click();
      setTimeout(() => URL.revokeObjectURL(address), 60_000);
      return `${this.ids.size} in ${name}`;
    });
  }

  async tag(way) {
    const name = $("tag-name").value.trim();
    if (!name) return;
    await this.doing("Tagging …", async () => {
      const { changed } = await call("images/tags", post({ ids: [...this.ids], [way]: [name] }));
      for (const match of this.chosen()) {
        const others = match.tags.filter((one) => one !== name);
        match.tags = way === "add" ? [...others, name].sort() : others;
        this.onChanged(match);
      }
      this.onTagged();
      return `${changed} ${way === "add" ? "have" : "no longer have"} the tag ${name}`;
    });
  }

  // The same mark again takes it back.
  async mark(mark) {
    await this.doing("Marking …", async () => {
      const chosen = this.chosen();
      const given = chosen.every((one) => one.marked === mark) ? "none" : mark;
      const body = { ...this.marksBy(), ids: chosen.map((one) => one.id), scores: chosen.map((one) => one.score), mark: given };
      const { changed } = await call("marks", post(body));
      for (const match of chosen) {
        match.marked = given === "none" ? undefined : given;
        this.onChanged(match);
      }
      return given === "none" ? `${changed} marks taken back` : `${changed} marked ${given}`;
    });
  }

  askToRemove() {
    const count = this.ids.size;
    $("removing-title").textContent = `Remove ${count} ${count === 1 ? "picture" : "pictures"}?`;
    $("removing-files").checked = false;
    $("removing").returnValue = ""; // or Escape would be what was answered before
    $("removing").showModal();
  }

  async remove(files) {
    await this.doing("Removing …", async () => {
      const ids = [...this.ids];
      const { changed } = await call("images/remove", post({ ids, files }));
      this.set([]);
      this.onRemoved(new Set(ids), `${changed} removed${files ? ", their files deleted" : ""}.`);
    });
  }

  async doing(text, work) {
    const before = $("selected").textContent;
    this.say(text);
    try {
      this.say(await work() ?? "");
    } catch (error) {
      this.say(before);
      this.onProblem(error);
    }
  }
}
