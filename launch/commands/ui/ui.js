// Replaces the parts of a page that changed, and reads figures of charts. Text is set as text; HTML comes escaped.
"use strict";
(() => {
  const main = document.querySelector("main[data-api]");
  const form = document.querySelector("form[data-live]");
  let every = main ? Number(main.dataset.every) : 0;
  let timer = 0, running = null, failures = 0;

  const query = () => {
    const found = new URLSearchParams(location.search);
    if (form) {
      const names = new Set([...form.elements].map((each) => each.name).filter(Boolean));
      for (const name of names) found.delete(name);
      for (const [name, value] of new FormData(form)) if (value !== "") found.append(name, value);
    }
    return found;
  };

  async function refresh(isFromForm) {
    clearTimeout(timer);
    if (running) running.abort();
    const mine = (running = new AbortController());
    main.setAttribute("aria-busy", "true");
    try {
      const reply = await fetch(main.dataset.api + "?" + query(), {signal: mine.signal});
      if (!reply.ok) throw new Error(String(reply.status));
      const state = await reply.json();
      show(state);
      every = state.every_s;
      failures = 0;
      if (isFromForm) history.replaceState(null, "", "?" + query());
    } catch (error) {
      if (error.name === "AbortError") return;
      failures += 1;
    }
    if (running !== mine) return;
    running = null;
    main.removeAttribute("aria-busy");
    document.body.classList.toggle("lost", failures > 2);
    wait();
  }

  function wait() {
    clearTimeout(timer);
    if (every > 0 && !document.hidden) timer = setTimeout(refresh, 1000 * every * Math.min(10, 1 + failures));
  }

  function show(state) {
    document.title = state.title;
    for (const [name, html] of Object.entries(state.parts)) {
      const part = main.querySelector(`[data-part="${name}"]`);
      if (!part || part.source === html) continue;
      part.source = html;
      const focused = document.activeElement && part.contains(document.activeElement)
        ? document.activeElement.dataset.id || document.activeElement.id : "";
      const opened = new Set([...part.querySelectorAll("details[open]")].map((each) => each.dataset.id));
      const checked = new Set([...part.querySelectorAll("input:checked")].map((each) => each.value));
      const typed = new Map([...part.querySelectorAll("textarea")].map((each) => [each.name, each.value]));
      const below = fromEnd(part);
      part.innerHTML = html;
      for (const each of part.querySelectorAll("textarea")) each.value = typed.get(each.name) ?? "";
      for (const each of part.querySelectorAll("details")) each.open = opened.has(each.dataset.id);
      for (const each of part.querySelectorAll("input[type=checkbox]")) each.checked = checked.has(each.value);
      toEnd(part, below);
      if (focused) (part.querySelector(`[data-id="${CSS.escape(focused)}"]`) || document.getElementById(focused))?.focus();
    }
    filter();
    compare();
    sort();
    if (at !== null) read(at);
  }

  // The log begins at its end, and stays where it was read.
  const log = "details[data-id=log] pre";
  function fromEnd(part) {
    const found = part.querySelector(log);
    return found ? found.scrollHeight - found.scrollTop - found.clientHeight : 0;
  }
  function toEnd(part, below) {
    const found = part.querySelector(log);
    if (found) found.scrollTop = found.scrollHeight - found.clientHeight - below;
  }
  document.addEventListener("toggle", (event) => { if (event.target.dataset.id === "log") toEnd(document, 0); }, true);

  // The list: a filter, and the runs to compare.
  const box = document.getElementById("filter"), button = document.getElementById("compare-button");
  function filter() {
    if (!box) return;
    const words = box.value.toLowerCase().split(/\s+/);
    for (const row of document.querySelectorAll("table.runs tbody tr")) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  }
  function compare() {
    if (!button) return;
    const count = document.querySelectorAll("table.runs input:checked").length;
    button.disabled = count < 2;
    button.textContent = count < 2 ? "Compare selected" : `Compare ${count} runs`;
  }

  // The list by a column: numbers by what a cell gives, text as it stands; rows without a value last.
  let order = null;
  function valueOf(row) {
    let place = 0;
    for (const cell of row.cells) {
      if (place <= order.column && order.column < place + cell.colSpan) {
        if (cell.colSpan > 1) return "";
        if (cell.dataset.by === undefined) return cell.textContent.toLowerCase();
        return cell.dataset.by === "" ? "" : Number(cell.dataset.by);
      }
      place += cell.colSpan;
    }
    return "";
  }
  function sort() {
    const body = document.querySelector("table.runs tbody");
    if (!body || !order) return;
    const rows = [...body.rows].map((row) => [valueOf(row), row]);
    rows.sort(([one], [other]) => {
      if (one === "" || other === "") return (one === "") - (other === "");
      return order.sign * (one < other ? -1 : one > other ? 1 : 0);
    });
    for (const [, row] of rows) body.appendChild(row);
    for (const title of document.querySelectorAll("table.runs th[aria-sort]")) {
      const isOf = Number(title.firstElementChild.dataset.sort) === order.column;
      title.setAttribute("aria-sort", !isOf ? "none" : order.sign > 0 ? "ascending" : "descending");
    }
  }
  document.addEventListener("click", (event) => {
    const title = event.target.closest?.("[data-sort]");
    if (!title) return;
    const column = Number(title.dataset.sort);
    order = {column, sign: order?.column === column ? -order.sign : 1};
    sort();
  });

  // The figures of charts: one place on the x axis, read in every chart that has that axis.
  let at = null;
  const figures = (plot) => (plot.figures ??= JSON.parse(plot.dataset.chart));
  function nearest(points, x) {
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] <= x) low = middle; else high = middle;
    }
    if (!points.length) return null;
    return x - points[low][0] <= points[high][0] - x ? points[low] : points[high];
  }
  function read(place) {
    at = place;
    for (const plot of document.querySelectorAll("figure.plot")) {
      const chart = figures(plot);
      const isShown = place !== null && chart.label === place.label && place.x >= chart.left && place.x <= chart.right;
      let note = plot.querySelector(".reading"), line = plot.querySelector(".cursor");
      if (!isShown) { note?.remove(); line?.remove(); continue; }
      if (!note) {
        note = plot.appendChild(Object.assign(document.createElement("div"), {className: "reading"}));
        line = plot.appendChild(Object.assign(document.createElement("div"), {className: "cursor"}));
        if (plot === document.activeElement) note.setAttribute("role", "status");
      }
      const drawn = plot.querySelectorAll(".chart > svg")[1].getBoundingClientRect(), frame = plot.getBoundingClientRect();
      const share = chart.right > chart.left ? (place.x - chart.left) / (chart.right - chart.left) : 0.5;
      const left = drawn.left - frame.left + share * drawn.width;
      line.style.left = `${left}px`;
      line.style.top = `${drawn.bottom - frame.top - 204}px`;  // of the plot: 180 high, above the figures of the axis
      const close = 0.005 * (chart.right - chart.left);  // a series is read at its own points, a level everywhere
      const rows = chart.series.map((each, number) => [each.name, nearest(each.points, place.x), number, each.level])
        .filter(([, point, , level]) => point && point[1] !== null && (level || Math.abs(point[0] - place.x) <= close));
      note.replaceChildren(...[["", [place.x, `${chart.label} ${place.text}${chart.suffix}`], -1], ...rows].map(([name, point, number]) => {
        const row = document.createElement("p");
        if (number >= 0) row.appendChild(Object.assign(document.createElement("span"), {className: `key c${number % 12}`}));
        row.append(" ", Object.assign(document.createElement("b"), {textContent: point[1]}), ` ${name}`);
        return row;
      }));
      const isRight = share > 0.5;
      note.style.left = isRight ? "auto" : `${left + 12}px`;
      note.style.right = isRight ? `${frame.width - left + 12}px` : "auto";
      note.style.maxWidth = `${Math.max(80, (isRight ? left : frame.width - left) - 14)}px`;
      note.style.top = `${drawn.top - frame.top + 12}px`;
    }
  }
  const grid = (chart) => chart.series.reduce((one, each) => each.points.length > one.length ? each.points : one, []);
  function readAt(plot, x) {
    const chart = figures(plot), point = nearest(grid(chart), x);
    if (point) read({x: point[0], text: Number(point[0].toPrecision(6)).toLocaleString("en"), label: chart.label});
  }
  document.addEventListener("pointermove", (event) => {
    const plot = event.target.closest?.("figure.plot");
    if (!plot) { if (at !== null && !document.activeElement?.matches("figure.plot")) read(null); return; }
    const drawn = plot.querySelectorAll(".chart > svg")[1].getBoundingClientRect(), chart = figures(plot);
    const share = Math.min(1, Math.max(0, (event.clientX - drawn.left) / drawn.width));
    readAt(plot, chart.left + share * (chart.right - chart.left));
  });
  // Enter sends a question, Shift and Enter begin a new line.
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || !event.target.matches?.("[data-enter]")) return;
    event.preventDefault();
    if (!event.target.form.querySelector("button").disabled) event.target.form.requestSubmit();
  });
  document.addEventListener("keydown", (event) => {
    const plot = event.target.closest?.("figure.plot");
    if (!plot) return;
    if (event.key === "Escape") return read(null);
    const points = grid(figures(plot)), step = {ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity}[event.key];
    if (!step || !points.length) return;
    event.preventDefault();
    const now = at === null ? (step > 0 ? -1 : points.length) : points.findIndex((point) => point[0] >= at.x);
    readAt(plot, points[Math.min(points.length - 1, Math.max(0, now + step))][0]);
  });
  document.addEventListener("focusout", (event) => { if (event.target.matches?.("figure.plot")) read(null); });

  const changed = (event) => {
    if (event.target === box) filter();
    if (event.target.matches("table.runs input")) compare();
    if (!form || !form.contains(event.target)) return;
    const waits = event.target.dataset.on === "change" && event.type === "input";
    const list = event.target.list;
    if (waits && ![...list.options].some((each) => each.value === event.target.value)) return;
    const take = form.elements.take;
    if (take) take.value = 1;
    clearTimeout(timer);
    timer = setTimeout(() => refresh(true), 250);
  };
  document.addEventListener("input", changed);
  document.addEventListener("change", (event) => { if (event.target.dataset.on === "change") changed(event); });
  document.addEventListener("submit", (event) => {
    if (event.target !== form) return;
    event.preventDefault();
    refresh(true);
  });
  document.addEventListener("click", (event) => {
    const copy = event.target.closest?.("[data-copy]");
    if (!copy) return;
    const text = document.getElementById(copy.dataset.copy).textContent;
    navigator.clipboard.writeText(text).then(() => {
      copy.textContent = "Copied";
      setTimeout(() => { copy.textContent = "Copy"; }, 1500);
    });
  });
  document.addEventListener("visibilitychange", () => { if (main && !document.hidden && every > 0) refresh(false); });

  document.documentElement.classList.add("js");
  compare();
  if (main) wait();
})();
