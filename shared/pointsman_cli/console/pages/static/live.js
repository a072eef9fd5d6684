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

  // Rows near the window are changed at once; of others the newest values are kept until they come near, so that a frame
  // costs what is seen, not what there is.
  const near = new Set(), later = new Map();
  const nearness = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) { near.delete(target); continue; }
      near.add(target);
      flush(target);
    }
  }, { rootMargin: "400px 0px" });

  // A cell is a text, or one span with a class and a text, or anything else; the first two need no parser.
  const SPAN = /^<span class="([^"<>&]*)">([^<&]*)<\/span>$/;

  function text(element, value) {
    const only = element.firstChild;
    if (only && only.nodeType === 3 && !only.nextSibling) { if (only.data !== value) only.data = value; }
    else element.textContent = value;
  }

  function fill(element, html) {
    if (!html.includes("<") && !html.includes("&")) { text(element, html); return; }
    const span = SPAN.exec(html), only = element.firstElementChild;
    if (span && only && only.localName === "span" && element.childNodes.length === 1 && !only.firstElementChild) {
      if (only.className !== span[1]) only.className = span[1];
      text(only, span[2]);
      return;
    }
    const active = element.contains(document.activeElement) ? document.activeElement : null;
    const opened = [...element.querySelectorAll("details")].map((details) => details.open);
    mold.innerHTML = html;
    element.replaceChildren(mold.content);
    element.querySelectorAll("details").forEach((details, place) => { if (opened[place]) details.open = true; });
    if (!active) return;
    const path = active.getAttribute("href");
    const again = (active.id && document.getElementById(active.id)) || (path && [...element.querySelectorAll("a")].find((a) => a.getAttribute("href") === path));
    if (again) again.focus({ preventScroll: true });
  }

  function write(row, cells) {
    for (const [at, html] of Object.entries(cells)) {
      if (at !== "level") fill(row.children[at], html);
      else if (html) row.dataset.level = html;
      else delete row.dataset.level;
    }
  }

  function flush(row) {
    const cells = later.get(row);
    if (cells && later.delete(row)) write(row, cells);
  }

  function put(row, cells) {
    if (near.has(row)) write(row, cells);
    else later.set(row, Object.assign(later.get(row) || {}, cells));
  }

  const whole = ([level, ...cells]) => ({ level, ...cells });

  function born(body, key, cells) {
    const row = document.createElement("tr");
    row.id = key;
    row.setAttribute("role", "row");
    [...body.parentElement.tHead.rows[0].children].forEach((head, place) => {
      const cell = document.createElement(place ? "td" : "th");
      if (!place) cell.scope = "row";
      cell.setAttribute("role", place ? "cell" : "rowheader");
      cell.className = head.className;
      row.append(cell);
    });
    write(row, whole(cells));
    nearness.observe(row);
    return row;
  }

  function arrange(body, order, rows) {
    const wanted = new Set(order), focus = document.activeElement;
    for (const row of [...body.children]) {
      if (wanted.has(row.id)) continue;
      nearness.unobserve(row);
      near.delete(row);
      later.delete(row);
      row.remove();
    }
    const rowOf = (key) => document.getElementById(key) || (rows[key] && born(body, key, rows[key]));
    if (body.parentElement.querySelector("[aria-sort]")) {  // sorted by the reader: others come below
      for (const key of order) if (!document.getElementById(key) && rows[key]) body.append(rowOf(key));
      return;
    }
    let at = body.firstElementChild;
    for (const key of order) {
      if (at && at.id === key) { at = at.nextElementSibling; continue; }
      const row = rowOf(key);
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
      for (const [key, cells] of Object.entries(table.rows || {})) {
        const row = document.getElementById(key);
        if (row) put(row, whole(cells));
      }
      for (const [key, cells] of Object.entries(table.cells || {})) {
        const row = document.getElementById(key);
        if (row) put(row, cells);
      }
      if (table.order) arrange(body, table.order, table.rows || {});
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
  addEventListener("beforeprint", () => [...later.keys()].forEach(flush));
  if (address) document.querySelectorAll("tbody[id] > tr[id]").forEach((row) => nearness.observe(row));
  open();
})();
