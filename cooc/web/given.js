// Photos that are chosen, dropped or pasted.

import { notice } from "./notices.js";

const $ = (id) => document.getElementById(id);

// onPhotos(pictures, join): search by them; join: together with those before.
export function begin(onPhotos) {
  let joining = false;

  function given(files, join = false) {
    const blobs = [...files].filter((one) => one.type.startsWith("image/") || /\.(heic|heif|avif|tiff?)$/i.test(one.name));
    if (blobs.length) onPhotos(blobs.map((blob) => ({ blob, url: URL.createObjectURL(blob), box: null })), join);
    else if (files.length) notice("This is no picture.", ["Choose a photo: JPEG, PNG, WebP, HEIC, ..."], [], "problem");
  }

  $("file").addEventListener("change", (event) => {
    given(event.target.files, joining);
    event.target.value = "";
  });
  for (const [button, join] of [["choose", false], ["add", true]]) {
    $(button).addEventListener("click", () => { joining = join; $("file").click(); });
  }
  addEventListener("paste", (event) => given(event.clipboardData.files));
  addEventListener("dragover", (event) => {
    event.preventDefault();
    document.body.classList.toggle("dropping", event.dataTransfer.types.includes("Files"));
  });
  addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) document.body.classList.remove("dropping");
  });
  addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("dropping");
    given(event.dataTransfer.files);
  });
}
