// Pictures for the collection: chosen or dropped, sent one after another, with a line for each that says how it went.

import { call } from "./api.js";
import { notice } from "./notices.js";

const $ = (id) => document.getElementById(id);

// onDone(): the collection has more pictures now; resolves when that is shown.
export function begin(onDone) {
  const dialog = $("adding");
  let waiting = []; // [file, its line]
  let sending = false;
  let done, added, total;

  $("add-pictures").addEventListener("click", () => {
    if (!sending) {
      const folders = [...$("folder").options].map((one) => one.value).filter(Boolean);
      $("folders").replaceChildren(...folders.map((path) => new Option(path, path)));
      $("adding-folder").value = $("folder").value || $("update").dataset.folder;
      $("adding-list").replaceChildren();
      $("adding-state").textContent = "";
      $("adding-progress").hidden = true;
    }
    dialog.showModal();
  });
  $("adding-close").addEventListener("click", () => dialog.close()); // what was begun goes on
  $("adding-stop").addEventListener("click", () => {
    for (const [file, line] of waiting) fail(file, line, "not sent");
    total -= waiting.length;
    waiting = [];
  });
  $("adding-files").addEventListener("change", (event) => {
    take(event.target.files);
    event.target.value = "";
  });
  for (const name of ["dragover", "drop", "paste"]) { // here they are not for a search
    dialog.addEventListener(name, (event) => {
      event.stopPropagation();
      if (name !== "paste") event.preventDefault();
      if (name !== "dragover") take((event.dataTransfer ?? event.clipboardData).files);
    });
  }
  addEventListener("beforeunload", (event) => sending && event.preventDefault());

  function take(files) {
    for (const file of files) {
      const line = document.createElement("li");
      line.textContent = file.name;
      $("adding-list").append(line);
      waiting.push([file, line]);
    }
    if (sending) total += files.length;
    else if (waiting.length) send();
  }

  async function send() {
    [done, added, total] = [0, 0, waiting.length];
    busy(true);
    while (waiting.length) {
      const [file, line] = waiting.shift();
      show(`Adding ${done + 1} of ${total} …`);
      try {
        line.textContent = `\u2713 ${await add(file)}`;
        added += 1;
      } catch (error) {
        fail(file, line, error.message);
      }
      done += 1;
    }
    busy(false);
    show(`${added} of ${total} added.`);
    if (added) await onDone();
    const left = [...$("adding-list").querySelectorAll(".problem")].map((line) => line.textContent);
    if (!dialog.open) notice(`${added} of ${total} added.`, left, [], left.length ? "problem" : "");
  }

  function busy(now) {
    sending = $("adding-folder").disabled = now;
    $("adding-stop").hidden = !now;
  }

  function show(text) {
    $("adding-state").textContent = text;
    Object.assign($("adding-progress"), { hidden: false, max: total, value: done });
  }
}

function fail(file, line, why) {
  line.className = "problem";
  line.textContent = `${file.name}: ${why}`;
}

// Where it lies now, in the collection.
async function add(file) {
  const body = new FormData();
  body.append("image", file, file.name);
  body.append("folder", $("adding-folder").value.trim());
  const { pictures, problems } = await call("images", { method: "POST", body });
  if (problems.length) throw new Error(problems[0].reason);
  return pictures[0].path;
}
