// Keeps a page up to date: one stream of changes from the server, applied once a frame. Without it the page still shows
// everything; reloading brings it up to date.
"use strict";
(() => {
  const LOST_AFTER = 3000;
  const address = document.body.dataset.live;
  const lost = document.getElementById("lost");
  const pauses = document.getElementById("pause");
  const mold = document.createElement("template");
  let stream = null, waiting = [], paused = false, timer = 0;

  const content = (html) => { mold.innerHTML = html; return mold.content; };

  function fill(element, html) {
    if (!html.includes("<") && !html.includes("&")) {
      const only = element.firstChild;
      if (only && only.nodeType === 3 && !only.nextSibling) { if (only.data !== html) only.data = html; }
      else element.textContent = html;
      return;
    }
    const focused = element.contains(document.activeElement) ? document.activeElement.id || document.activeElement.getAttribute("href") : null;
    element.replaceChildren(content(html));
    if (focused) {
      const again = document.getElementById(focused) || [...element.querySelectorAll("a")].find((a) => a.getAttribute("href") === focused);
      if (again) again.focus({ preventScroll: true });
    }
  }

  function level(row, value) {
    if (value) row.dataset.level = value; else delete row.dataset.level;
  }

  function born(body, key, cells) {
    const row = document.createElement("tr"), heads = body.parentElement.tHead.rows[0].children;
    row.id = key;
    level(row, cells[0]);
    for (let i = 1; i < cells.length; i++) {
      const cell = document.createElement(i === 1 ? "th" : "td");
      if (i === 1) cell.scope = "row";
      cell.className = heads[i - 1].className;
      fill(cell, cells[i]);
      row.append(cell);
    }
    return row;
  }

  function arrange(body, order, rows) {
    const wanted = new Set(order), focus = document.activeElement;
    for (const row of [...body.children]) if (!wanted.has(row.id)) row.remove();
    let at = body.firstElementChild;
    for (const key of order) {
      if (at && at.id === key) { at = at.nextElementSibling; continue; }
      const row = document.getElementById(key) || (rows[key] && born(body, key, rows[key]));
      if (row) body.insertBefore(row, at);
    }
    if (focus && focus !== document.activeElement && focus.isConnected) focus.focus({ preventScroll: true });
  }

  function apply(change) {
    for (const [id, html] of Object.entries(change.parts || {})) {
      const element = document.getElementById(id);
      if (element) fill(element, html);
    }
    for (const [id, table] of Object.entries(change.tables || {})) {
      const body = document.getElementById(id);
      if (!body) continue;
      const rows = table.rows || {};
      for (const [key, cells] of Object.entries(rows)) {
        const row = document.getElementById(key);
        if (!row) continue;
        level(row, cells[0]);
        for (let i = 1; i < cells.length; i++) fill(row.children[i - 1], cells[i]);
      }
      for (const [key, cells] of Object.entries(table.cells || {})) {
        const row = document.getElementById(key);
        if (!row) continue;
        for (const [at, html] of Object.entries(cells)) {
          if (at === "level") level(row, html); else fill(row.children[at], html);
        }
      }
      if (table.order) arrange(body, table.order, rows);
    }
  }

  function frame() {
    const changes = waiting;
    waiting = [];
    performance.mark("live");
    changes.forEach(apply);
    performance.measure("live frame", "live");
    document.documentElement.dataset.frames = 1 + Number(document.documentElement.dataset.frames || 0);
  }

  function open() {
    if (stream || paused || document.hidden || !address) return;
    stream = new EventSource(address);
    stream.onopen = () => { clearTimeout(timer); timer = 0; lost.hidden = true; };
    stream.onmessage = (message) => {
      if (!waiting.length) requestAnimationFrame(frame);
      waiting.push(JSON.parse(message.data));
    };
    stream.onerror = () => {
      timer = timer || setTimeout(() => { lost.hidden = false; }, LOST_AFTER);
      if (stream && stream.readyState === 2) { close(); setTimeout(open, LOST_AFTER); }
    };
  }

  function close() {
    if (stream) stream.close();
    stream = null;
  }

  function pause() {
    if (!pauses) return;
    paused = !paused;
    pauses.setAttribute("aria-pressed", String(paused));
    pauses.firstElementChild.textContent = paused ? "Resume" : "Pause";
    if (paused) close(); else open();
  }

  if (pauses && address) { pauses.hidden = false; pauses.addEventListener("click", pause); }
  document.addEventListener("visibilitychange", () => { if (document.hidden) close(); else open(); });
  addEventListener("pagehide", close);
  addEventListener("pageshow", open);
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
    if (localStorage.getItem("keys") === "off") return;
    if (event.key === "p" && pauses && !pauses.hidden) pause();
    const search = document.querySelector("[data-search]");
    if (event.key === "/" && search) { event.preventDefault(); search.focus(); }
  });
  open();
})();
