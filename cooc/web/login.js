// The server's token, asked for once: the page begins again with the session that it gives.

import { call, onLogin, post } from "./api.js";

const $ = (id) => document.getElementById(id);

let session; // one question, however many requests were refused
onLogin(() => session ??= new Promise(() => { // the page begins again with it
  $("login").showModal();
  $("login").addEventListener("cancel", (event) => event.preventDefault());
  $("login-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      await call("session", post({ token: $("token").value }));
      location.reload();
    } catch (error) {
      $("login-problem").textContent = error.message;
    }
  });
}));
