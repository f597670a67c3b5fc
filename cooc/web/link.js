// A search as the part of an address after #, so that it can be kept, sent to others, and survives a reload.

import { boxText } from "./api.js";

// query: as in app.js, or null; options: what differs from the default, as { name: text }.
export function toLink(query, options) {
  const found = new URLSearchParams();
  const pictures = query?.pictures ?? [];
  if (pictures[0]?.id) found.set("id", pictures[0].id);
  else if (pictures.length) found.set("photo", pictures.map((one) => one.sha256 ?? "").join(","));
  const boxes = pictures.map((one) => boxText(one.box)).join(";");
  if (/\d/.test(boxes)) found.set("box", boxes);
  for (const [name, value] of Object.entries(options)) if (value) found.set(name, value);
  return `#${found}`;
}

export function fromLink(hash) {
  const { id = "", photo, box = "", ...options } = Object.fromEntries(new URLSearchParams(hash.slice(1)));
  const boxes = box.split(";").map((text) => text.split(",").map(Number));
  return {
    id: /^[0-9a-f]{32}$/.test(id) ? id : "",
    photos: (photo ?? "").split(",").filter((name) => /^[0-9a-f]{64}$/.test(name)),
    boxes: boxes.map((one) => (one.length === 4 && one.every(Number.isFinite) ? one : null)),
    options,
  };
}
