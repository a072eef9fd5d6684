// The colour scheme that the reader chose, before the first paint, and the switches for it and for the keys.
"use strict";
(() => {
  const root = document.documentElement;
  const names = { "": "auto", light: "light", dark: "dark" };
  const show = () => {
    const theme = localStorage.getItem("theme") || "";
    if (theme) root.dataset.theme = theme; else delete root.dataset.theme;
    const button = document.getElementById("theme");
    if (button) button.lastElementChild.textContent = names[theme];
    const keys = document.getElementById("keys");
    if (keys) keys.checked = localStorage.getItem("keys") !== "off";
  };
  show();
  addEventListener("DOMContentLoaded", () => {
    document.querySelectorAll("[data-scripted]").forEach((element) => { element.hidden = false; });
    show();
    document.getElementById("theme").addEventListener("click", () => {
      const order = ["", "light", "dark"];
      localStorage.setItem("theme", order[(order.indexOf(localStorage.getItem("theme") || "") + 1) % 3]);
      show();
    });
    document.getElementById("keys").addEventListener("change", (event) => localStorage.setItem("keys", event.target.checked ? "on" : "off"));
  });
})();
