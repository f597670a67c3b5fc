// A box on a picture that can be drawn, moved and resized, with a pointer or with the keyboard.
// It is kept in pixels of the full-size picture and placed in percent, so it stays right at any size on the screen.

const HANDLES = { nw: [0, 0], n: [0.5, 0], ne: [1, 0], e: [1, 0.5], se: [1, 1], s: [0.5, 1], sw: [0, 1], w: [0, 0.5] };
const SMALLEST = 12; // pixels on the screen: less is a click, not a box
const LONG = 350; // milliseconds: a finger that rests so long draws, one that moves before that scrolls the page
const STILL = 10; // pixels that a resting finger may move

export class BoxEditor {
  constructor(host, onChange) {
    this.host = host;
    this.onChange = onChange;
    this.picture = null;
    this.element = null;
    this.drawing = false;
    host.addEventListener("pointerdown", (event) => (this.scrolls(event) ? this.wait(event) : this.begin(event)));
    host.addEventListener("touchmove", (event) => this.drawing && event.preventDefault(), { passive: false });
    host.addEventListener("contextmenu", (event) => this.waiting && event.preventDefault());
  }

  // A finger on the box itself moves it at once; elsewhere it may want to scroll.
  scrolls(event) {
    return event.pointerType === "touch" && !this.element?.contains(event.target);
  }

  wait(event) {
    const stop = () => {
      clearTimeout(this.waiting);
      for (const [name, listener] of Object.entries(listeners)) this.host.removeEventListener(name, listener);
      this.waiting = null;
    };
    const listeners = {
      pointermove: (e) => Math.hypot(e.clientX - event.clientX, e.clientY - event.clientY) > STILL && stop(),
      pointerup: stop,
      pointercancel: stop,
    };
    for (const [name, listener] of Object.entries(listeners)) this.host.addEventListener(name, listener);
    this.waiting = setTimeout(() => {
      stop();
      this.drawing = true;
      this.host.classList.add("drawing");
      navigator.vibrate?.(15);
      this.begin(event);
    }, LONG);
  }

  // picture: { width, height, box }; the box is written back into it.
  edit(picture) {
    this.picture = picture;
    this.show();
  }

  show() {
    this.element?.remove();
    this.element = null;
    if (!this.picture?.box) return;
    const box = document.createElement("div");
    box.className = "box";
    box.tabIndex = 0;
    box.setAttribute("role", "group");
    box.addEventListener("keydown", (event) => this.key(event));
    for (const [name, [x, y]] of Object.entries(HANDLES)) {
      const handle = document.createElement("i");
      handle.dataset.handle = name;
      handle.style.left = `${100 * x}%`;
      handle.style.top = `${100 * y}%`;
      handle.style.cursor = `${name}-resize`;
      box.append(handle);
    }
    this.host.append(box);
    this.element = box;
    this.place();
  }

  // Without a pointer: a box in the middle, which the keys then move.
  put() {
    const { width, height } = this.picture;
    this.picture.box = [width / 4, height / 4, (3 * width) / 4, (3 * height) / 4];
    this.show();
    this.element.focus();
    this.onChange();
  }

  place() {
    const { width, height, box } = this.picture;
    const [x0, y0, x1, y1] = box;
    Object.assign(this.element.style, {
      left: `${(100 * x0) / width}%`,
      top: `${(100 * y0) / height}%`,
      width: `${(100 * (x1 - x0)) / width}%`,
      height: `${(100 * (y1 - y0)) / height}%`,
    });
    const [w, h] = [x1 - x0, y1 - y0].map(Math.round);
    this.element.setAttribute(
      "aria-label",
      `Box, ${w} by ${h} pixels. Arrow keys move it, with Shift they resize it, Delete removes it.`,
    );
  }

  // Drawing, moving and resizing are one gesture: which edges of the box follow the pointer?
  begin(event) {
    if (!this.picture?.width || event.button !== 0) return;
    event.preventDefault();
    const { width, height } = this.picture;
    const area = this.host.getBoundingClientRect();
    const at = (e) => [((e.clientX - area.left) / area.width) * width, ((e.clientY - area.top) / area.height) * height];
    const before = this.picture.box;
    const handle = event.target.dataset?.handle;
    const start = at(event);
    let follow;
    if (handle) {
      follow = ([x, y]) => {
        const [x0, y0, x1, y1] = before;
        return tidy([
          handle.includes("w") ? x : x0, handle.includes("n") ? y : y0,
          handle.includes("e") ? x : x1, handle.includes("s") ? y : y1,
        ]);
      };
    } else if (event.target === this.element) {
      follow = ([x, y]) => moved(before, x - start[0], y - start[1], width, height);
    } else {
      follow = ([x, y]) => tidy([...start, x, y]);
    }
    const move = (e) => {
      const [x, y] = at(e);
      this.picture.box = follow([clamp(x, width), clamp(y, height)]);
      if (this.element) this.place();
      else this.show();
    };
    const end = (e) => {
      this.drawing = false;
      this.host.classList.remove("drawing");
      this.host.removeEventListener("pointermove", move);
      this.host.removeEventListener("pointerup", end);
      this.host.removeEventListener("pointercancel", end);
      const smallest = (SMALLEST / area.width) * width;
      const box = this.picture.box;
      const tiny = box && (box[2] - box[0] < smallest || box[3] - box[1] < smallest);
      if (tiny || e.type === "pointercancel") this.picture.box = before;
      this.show();
      if (String(this.picture.box) !== String(before)) this.onChange();
    };
    this.host.setPointerCapture(event.pointerId);
    this.host.addEventListener("pointermove", move);
    this.host.addEventListener("pointerup", end);
    this.host.addEventListener("pointercancel", end);
  }

  key(event) {
    const { width, height, box } = this.picture;
    const step = Math.max(width, height) / 50;
    const [dx, dy] = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] }[event.key] ?? [];
    if (event.key === "Delete" || event.key === "Backspace") {
      this.picture.box = null;
      this.show();
      this.onChange();
    } else if (dx !== undefined) {
      const [x0, y0, x1, y1] = box;
      this.picture.box = event.shiftKey
        ? [x0, y0, clamp(Math.max(x1 + dx, x0 + step), width), clamp(Math.max(y1 + dy, y0 + step), height)]
        : moved(box, dx, dy, width, height);
      this.place();
      this.onChange();
    } else {
      return;
    }
    event.preventDefault();
  }
}

const clamp = (value, most) => Math.min(Math.max(value, 0), most);
const tidy = ([a, b, c, d]) => [Math.min(a, c), Math.min(b, d), Math.max(a, c), Math.max(b, d)];

function moved([x0, y0, x1, y1], dx, dy, width, height) {
  const right = Math.min(Math.max(dx, -x0), width - x1);
  const down = Math.min(Math.max(dy, -y0), height - y1);
  return [x0 + right, y0 + down, x1 + right, y1 + down];
}
