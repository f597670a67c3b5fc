// Which pictures count: folder, tag and time. The same choices browse the collection and narrow a search.

import { call } from "./api.js";

const $ = (id) => document.getElementById(id);
const FIELDS = ["folder", "tag", "from", "to"];

export const chosen = () => Object.fromEntries(FIELDS.map((id) => [id, $(id).value]));
export const filtered = () => FIELDS.some((id) => $(id).value);

// As the API wants it.
export function where() {
  const { folder, tag, from, to } = chosen();
  return { folder, tag, taken_from: from, taken_to: to };
}

// onChange(): other pictures count now.
export function begin(onChange, onProblem) {
  const changed = (again) => {
    show();
    if (again) fillFolders().catch(onProblem);
    onChange();
  };
  $("folder").addEventListener("change", () => changed(true));
  $("tag").addEventListener("change", () => changed());
  $("month").addEventListener("change", () => {
    [$("from").value, $("to").value] = days($("month").value);
    changed();
  });
  for (const id of ["from", "to"]) $(id).addEventListener("change", () => changed());
  $("clear").addEventListener("click", () => {
    set({});
    changed(true);
  });
}

// From a link: what is not in it is not chosen. A value that no menu holds yet gets its entry.
export function set(values) {
  for (const id of FIELDS) {
    const value = values[id] ?? "";
    if (value && $(id).options && ![...$(id).options].some((one) => one.value === value)) $(id).add(new Option(value, value));
    $(id).value = value;
  }
  show();
}

function show() {
  $("clear").hidden = !filtered();
  const month = $("from").value.slice(0, 7);
  const whole = month && String([$("from").value, $("to").value]) === String(days(month));
  $("month").value = whole ? month : "";
}

// 2024-02 -> its first and its last day.
function days(month) {
  if (!month) return ["", ""];
  const [year, number] = month.split("-").map(Number);
  return [`${month}-01`, `${month}-${new Date(Date.UTC(year, number, 0)).getUTCDate()}`];
}

export async function fill() {
  const [{ tags }, { months }] = await Promise.all([call("tags"), call("months"), fillFolders()]);
  menu("tag", "All tags", tags.map(({ tag, pictures }) => [tag, `${tag} (${pictures})`]));
  menu("month", "All months", months.map(({ month, pictures }) => [month, `${month} (${pictures})`]));
  $("tags").replaceChildren(...tags.map(({ tag }) => new Option(tag, tag)));
  show();
}

// The menu holds the way down to the chosen folder and the folders below it: never all of them.
async function fillFolders() {
  const below = $("folder").value;
  const { folders, complete } = await call("folders", { query: { below } });
  const way = below.split("/").map((_, i, parts) => parts.slice(0, i + 1).join("/")).filter(Boolean);
  const entries = [...way.map((path) => [path, path]), ...folders.map(({ path, pictures }) => [path, `${path} (${pictures}) ›`])];
  menu("folder", "All folders", entries);
  if (!complete) $("folder").append(Object.assign(new Option("and more"), { disabled: true }));
}

function menu(id, all, entries) {
  const now = $(id).value;
  if (now && !entries.some(([value]) => value === now)) entries.unshift([now, now]);
  $(id).replaceChildren(...[["", all], ...entries].map(([value, text]) => new Option(text, value, false, value === now)));
}
