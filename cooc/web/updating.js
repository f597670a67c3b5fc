// Bringing the index up to date: how far it is, and which files were left out.

import { call, post, url } from "./api.js";
import { notice } from "./notices.js";

const $ = (id) => document.getElementById(id);
const NAMED = 10; // files that were left out

// onDone(): the index has changed; resolves when that is shown.
export function begin(onDone, onProblem) {
  function follow() {
    const events = new EventSource(url("indexing/events"));
    $("update").disabled = true;
    events.addEventListener("progress", async (event) => {
      const { state, done, total, message, bad, failed, problems } = JSON.parse(event.data);
      $("collection").textContent = state === "running" ? `Indexing: ${done} of ${total ?? "…"} pictures` : "";
      if (state === "running" || state === "stopping") return;
      events.close();
      $("update").disabled = false;
      await onDone();
      const lines = problems.slice(-NAMED).map(({ path, reason }) => `${path}: ${reason}`);
      if (message) lines.unshift(message);
      const left = bad + failed ? `Files that were left out: ${bad + failed}.` : "Not all was done.";
      if (lines.length) notice(state === "failed" ? "Indexing failed." : left, lines, [], "problem");
    });
  }

  $("update").addEventListener("click", async () => {
    try {
      await call("indexing", post({ folder: $("update").dataset.folder }));
      follow();
    } catch (error) {
      onProblem(error);
    }
  });
}
