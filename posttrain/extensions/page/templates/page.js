"use strict";
(() => {
  const $ = (selector, root = document) => root.querySelector(selector);
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
  const page = JSON.parse($("#page-data").textContent);
  const view = { smooth: 0, axis: "step", log: false, marks: true, hidden: new Set(), range: null };
  const drawn = new Set();
  const DASHES = ["", "7 4", "2 3", "7 3 2 3", "12 4"];
  const MARGIN = { left: 52, right: 12, top: 8, bottom: 24 }, HEIGHT = 220;

  // Recorded values stay text and are never parsed as markup.
  const plain = (value) => String(value).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
  const known = (value) => value !== null && Number.isFinite(value);

  function short(value) {
    const size = Math.abs(value);
    if (size >= 1e15 || (size > 0 && size < 1e-3)) return value.toExponential(2).replace(/\.?0+e/, "e");
    if (size >= 1e4) return value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 2 });
    return String(+value.toPrecision(4));
  }

  function smoothed(values) {
    if (!view.smooth) return values;
    let mean = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      mean = view.smooth * mean + (1 - view.smooth) * value;
      weight = view.smooth * weight + (1 - view.smooth); // Bias correction: otherwise the first values would tend to zero.
      return mean / weight;
    });
  }

  function nearest(xs, x, usable = () => true) {
    let best = -1;
    xs.forEach((at, i) => { if (known(at) && usable(i) && (best < 0 || Math.abs(at - x) < Math.abs(xs[best] - x))) best = i; });
    return best;
  }

  // Curves of a panel. Colors distinguish runs if there are several, else metrics; dashes then metrics, else evaluation.
  function curves(panel) {
    const metrics = [...new Set(panel.traces.map((trace) => trace.metric))], several = page.runs.length > 1;
    return panel.traces.filter((trace) => !view.hidden.has(trace.run)).map((trace) => {
      const at = metrics.indexOf(trace.metric), name = page.runs[trace.run].name;
      const label = !several ? trace.metric : metrics.length > 1 ? `${name} · ${trace.metric}` : name;
      const dash = several ? DASHES[at % 5] : trace.metric.startsWith("eval_") ? DASHES[2] : "";
      return { trace, label, dash, colour: `var(--c${(several ? trace.run : at) % 8})`, xs: trace[view.axis], ys: smoothed(trace.value) };
    });
  }

  // Scale from data to pixels with round ticks.
  function scale(low, high, from, to, log) {
    const f = log ? Math.log10 : (v) => v, a = f(low), span = f(high) - a, ticks = [];
    const raw = span / Math.max(2, Math.abs(to - from) / (from < to ? 65 : 38)), power = 10 ** Math.floor(Math.log10(raw));
    const step = power * ([1, 2, 5].find((n) => n * power >= raw) || 10);
    for (let t = Math.ceil(a / step - 1e-9) * step; t <= a + span + step * 1e-9; t += step) ticks.push(log ? 10 ** t : Math.abs(t) < step / 1e6 ? 0 : t);
    return { place: (v) => from + (f(v) - a) / span * (to - from), value: (p) => a + (p - from) / (to - from) * span, ticks };
  }

  function bounds(values, pad) {
    let low = Infinity, high = -Infinity;
    for (const v of values) if (known(v)) { low = Math.min(low, v); high = Math.max(high, v); }
    if (low > high) return [0, 1];
    const size = Math.max(Math.abs(low), Math.abs(high)), flat = high - low <= 1e-9 * size; // Smoothing a constant leaves rounding errors.
    const room = flat ? (size || 1) * 0.05 : (high - low) * pad;
    return [low - room, high + room];
  }

  function axes(lines, width) {
    const [x0, x1] = view.range || bounds(lines.flatMap((line) => line.xs), 0);
    const seen = lines.flatMap(({ trace, xs, ys }) => [...ys, ...trace.value].filter((_, i) => xs[i % xs.length] >= x0 && xs[i % xs.length] <= x1));
    const log = view.log && seen.some(known) && seen.every((v) => v === null || v > 0);
    let [y0, y1] = bounds(seen, log ? 0 : 0.06);
    if (log) { y0 *= 0.9; y1 *= 1.1; }
    const x = scale(x0, x1, MARGIN.left, width - MARGIN.right, false), y = scale(y0, y1, HEIGHT - MARGIN.bottom, MARGIN.top, log);
    return { x, y, log, range: [x0, x1] };
  }

  function path(xs, ys, { x, y }) {
    let pen = "M";
    return xs.map((at, i) => {
      if (!known(at) || !known(ys[i])) { pen = "M"; return ""; } // Leave a gap for a value that is not a number.
      const point = `${pen}${x.place(at).toFixed(1)} ${y.place(ys[i]).toFixed(1)}`;
      pen = "L";
      return point;
    }).join("");
  }

  function signs(panel, lines, { x, y }) {
    if (!view.marks) return "";
    const parts = [], place = (trace, step) => x.place(view.axis === "step" ? step : trace.minutes[nearest(trace.step, step)]);
    for (const item of panel.spans) {
      const line = lines.find(({ trace }) => trace.run === item.run);
      for (const [first, last] of line ? item.spans : []) {
        const left = place(line.trace, first), wide = Math.max(2, place(line.trace, last) - left);
        parts.push(`<rect class="shade" x="${left}" y="${MARGIN.top}" width="${wide}" height="${HEIGHT - MARGIN.top - MARGIN.bottom}"/>`);
      }
    }
    for (const mark of panel.marks) {
      const line = lines.find(({ trace }) => trace.run === mark.run);
      const at = line ? nearest(line.trace.step, mark.step, (i) => line.ys[i] !== null) : -1;
      if (at < 0) continue;
      const left = place(line.trace, mark.step), top = y.place(line.ys[at]);
      parts.push(`<path class="mark ${mark.severity}" d="M${left} ${MARGIN.top}V${HEIGHT - MARGIN.bottom}"/>`);
      parts.push(`<path class="gem ${mark.severity}" d="M${left - 6} ${top}l6 -6l6 6l-6 6z"/>`);
    }
    return parts.join("");
  }

  function draw(element) {
    const panel = page.panels.find((item) => item.key === element.dataset.panel), width = element.clientWidth;
    if (!panel || !width) return;
    drawn.add(element);
    const lines = curves(panel), frame = axes(lines, width), { x, y } = frame, unit = view.axis === "minutes" ? " min" : "";
    const bottom = HEIGHT - MARGIN.bottom, clip = `clip-${panel.key}`;
    const grid = [
      ...y.ticks.map((t) => `<path class="grid" d="M${MARGIN.left} ${y.place(t)}H${width - MARGIN.right}"/><text x="${MARGIN.left - 6}" y="${y.place(t) + 4}" text-anchor="end">${short(t)}</text>`),
      ...x.ticks.map((t) => `<text x="${x.place(t)}" y="${bottom + 16}" text-anchor="middle">${short(t)}${unit}</text>`),
    ].join("");
    const shown = lines.map((line) => {
      const style = `style="stroke:${line.colour}" stroke-dasharray="${line.dash}"`, few = line.xs.length < 40;
      const pale = view.smooth ? `<path class="line pale" ${style} d="${path(line.xs, line.trace.value, frame)}"/>` : "";
      const dots = few ? line.xs.map((at, i) => (known(at) && known(line.ys[i]) ? `<circle cx="${x.place(at)}" cy="${y.place(line.ys[i])}" r="2.2" style="fill:${line.colour}"/>` : "")).join("") : "";
      return `${pale}<path class="line" ${style} d="${path(line.xs, line.ys, frame)}"/>${dots}`;
    }).join("");
    element.innerHTML = `<svg width="${width}" height="${HEIGHT}" aria-hidden="true" data-log="${frame.log}" data-range="${frame.range}">`
      + `<clipPath id="${clip}"><rect x="${MARGIN.left - 3}" y="0" width="${width - MARGIN.left - MARGIN.right + 6}" height="${HEIGHT}"/></clipPath>`
      + `${grid}<path class="axis" d="M${MARGIN.left} ${bottom}H${width - MARGIN.right}"/><g clip-path="url(#${clip})">${signs(panel, lines, frame)}${shown}</g>`
      + `<path class="cursor"/><rect class="brush" y="${MARGIN.top}" height="${bottom - MARGIN.top}"/></svg><div class="tip" hidden></div>${legend(panel, lines)}`;
    pointer(element, panel, lines, frame);
  }

  function legend(panel, lines) {
    if (new Set(panel.traces.map((trace) => trace.metric)).size < 2) return "";
    const key = ({ label, colour, dash }) => `<span><svg width="22" height="8" aria-hidden="true"><path class="line" style="stroke:${colour}" stroke-dasharray="${dash}" d="M0 4H22"/></svg>${plain(label)}</span>`;
    return `<div class="legend">${lines.map(key).join("")}</div>`;
  }

  // Show values under the pointer. Dragging selects a range of steps for all panels; a double click shows the whole run.
  function pointer(element, panel, lines, { x }) {
    const svg = $("svg", element), tip = $(".tip", element), cursor = $(".cursor", element), brush = $(".brush", element);
    const left = (event) => event.clientX - svg.getBoundingClientRect().left;
    const hide = () => { tip.hidden = true; cursor.setAttribute("d", ""); };
    let begin = null;
    svg.onpointermove = (event) => {
      const at = left(event), value = x.value(at), step = (line) => line.trace.step[nearest(line.xs, value)];
      if (begin !== null) { brush.setAttribute("x", Math.min(begin, at)); brush.setAttribute("width", Math.abs(at - begin)); }
      const rows = lines.map((line) => { const i = nearest(line.xs, value, (j) => line.ys[j] !== null); return i < 0 ? "" : `<div><i class="dot" style="--run:${line.colour}"></i>${plain(line.label)} <b>${short(line.ys[i])}</b></div>`; });
      if (!lines.length) return;
      const here = step(lines[0]), told = view.marks ? panel.marks.filter((mark) => mark.step === here) : [];
      const texts = told.map((mark) => `<div class="${mark.severity}"><b class="tone">${plain(mark.severity)}</b> ${plain(mark.text)}</div>`);
      tip.innerHTML = `<div class="soft">step ${here}</div>${rows.join("")}${texts.join("")}`;
      tip.hidden = false;
      tip.style.left = `${Math.max(0, Math.min(at + 12, svg.clientWidth - tip.offsetWidth))}px`;
      cursor.setAttribute("d", `M${at} ${MARGIN.top}V${HEIGHT - MARGIN.bottom}`);
    };
    svg.onpointerleave = hide;
    svg.onpointerdown = (event) => { if (event.pointerType === "mouse") { begin = left(event); svg.setPointerCapture(event.pointerId); } };
    svg.onpointerup = (event) => {
      const from = begin, to = left(event);
      begin = null;
      brush.setAttribute("width", 0);
      if (from === null || Math.abs(to - from) < 8) return;
      view.range = [x.value(Math.min(from, to)), x.value(Math.max(from, to))];
      redraw();
    };
    svg.ondblclick = () => { view.range = null; redraw(); };
  }

  function redraw() {
    for (const element of drawn) draw(element);
  }

  function controls() {
    const bind = (id, event, change) => $(id).addEventListener(event, (e) => { change(e.target); redraw(); });
    bind("#smooth", "input", (input) => { view.smooth = +input.value; input.nextElementSibling.textContent = input.value; });
    bind("#axis", "change", (input) => { view.axis = input.value; view.range = null; });
    bind("#log", "change", (input) => { view.log = input.checked; });
    bind("#marks", "change", (input) => { view.marks = input.checked; });
    bind("#reset", "click", () => { view.range = null; });
    $(".controls").addEventListener("submit", (event) => event.preventDefault());
    addEventListener("resize", redraw);
    for (const box of $$("#runs input")) {
      const at = +box.dataset.run;
      box.addEventListener("change", () => { box.checked ? view.hidden.delete(at) : view.hidden.add(at); redraw(); });
    }
  }

  function timelines() {
    for (const timeline of $$(".timeline")) {
      const moments = $$(".moment", timeline), input = $("input[type=range]", timeline);
      if (!input) continue;
      const show = () => {
        moments.forEach((moment, at) => { moment.hidden = at !== +input.value; });
        $("output", timeline).textContent = moments[+input.value].dataset.label;
        input.setAttribute("aria-valuetext", moments[+input.value].dataset.label);
      };
      input.addEventListener("input", show);
      for (const button of $$("button", timeline)) button.addEventListener("click", () => { input.value = +input.value + +button.dataset.move; show(); });
      show();
    }
  }

  function theme() {
    const root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)");
    try { const remembered = localStorage.getItem("posttrain-theme"); if (remembered) root.dataset.theme = remembered; } catch { /* A file may not be allowed to remember. */ }
    $("#theme").addEventListener("click", () => {
      const dark = root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
      root.dataset.theme = dark ? "light" : "dark";
      try { localStorage.setItem("posttrain-theme", root.dataset.theme); } catch { /* As above. */ }
    });
  }

  theme();
  controls();
  timelines();
  $$("[data-panel]").forEach(draw);
})();
