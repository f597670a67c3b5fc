// Pictures without one that is looked for: the collection, what words describe, groups of copies.
// Each list gives the next pictures and where those after them begin; null if there are no more.

import { call } from "./api.js";
import * as filters from "./filters.js";
import { say } from "./notices.js";

export const PAGE = 30; // pictures asked for at once
const GROUPS = 10; // of which all files are looked at

export async function collection(after, signal) {
  const query = { limit: PAGE, after: after || "", ...filters.where() };
  const { pictures, next_after: next } = await call("images", { query, signal });
  return [pictures, next];
}

export async function byWords(text, offset, signal) {
  const found = await call("search/words", { query: { ...filters.where(), text, k: PAGE, offset }, signal });
  if (!offset) say(`What fits \u201c${text}\u201d best first, in ${found.seconds.toFixed(2)} s.`);
  return [found.matches, found.next_offset];
}

// Copies, group by group; the one to keep comes first, and says why.
export async function groups(offset, signal) {
  let found;
  while (!(found?.compared === 1)) { // the server has waited before it says how far it is
    if (found) say(`Comparing the pictures: ${Math.floor(100 * found.compared)} % …`);
    found = await call("near-duplicates", { query: { ...filters.where(), limit: GROUPS, offset }, signal });
  }
  if (!offset && found.groups.length) say("Groups of copies: of each, the picture to keep comes first.");
  const pictures = found.groups.flatMap(({ pictures, keep, why }) => {
    const kept = pictures.find(({ id }) => id === keep);
    kept.keep = why;
    const group = { pictures: [kept, ...pictures.filter((one) => one !== kept)], name: kept.path };
    for (const one of pictures) one.group = group;
    return group.pictures;
  });
  return [pictures, found.next_offset];
}

export const rest = (pictures) => pictures.filter((one) => !one.keep).map((one) => one.id);

// What is left when some are gone: a picture without copies is no group.
export function withoutSingles(left, gone) {
  for (const group of new Set(left.map((one) => one.group).filter(Boolean))) {
    group.pictures = group.pictures.filter((one) => !gone.has(one.id));
    group.pictures[0].keep ??= "what is left"; // or all of them would be the rest
  }
  return left.filter(({ group }) => !group || group.pictures.length > 1);
}
