"use strict";
(() => {
  const $ = (selector, root = document) => root.querySelector(selector);
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
  let page = JSON.parse($("#page-data").textContent);
  const view = { smooth: 0, axis: "step", log: false, marks: true, hidden: new Set(), range: null };
  const drawn = new Set();
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];

  // Labels of plotly understand a few tags: what the record says must stay text there too.
  const plain = (value) => String(value).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const wrapped = (value, width = 56) => plain(value).replace(new RegExp(`(.{${width}}\\S*) `, "g"), "$1<br>");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const alpha = (hex, share) => hex + Math.round(share * 255).toString(16).padStart(2, "0");

  function smoothed(values) {
    if (!view.smooth) return values;
    let mean = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      mean = view.smooth * mean + (1 - view.smooth) * value;
      weight = view.smooth * weight + (1 - view.smooth); // Without it the first values would lean to zero.
      return mean / weight;
    });
  }

  // A finding stands on the curve of its run, at the point nearest to its step.
  function nearest(trace, step) {
    let best = 0;
    trace.step.forEach((s, i) => { if (trace.value[i] !== null && (trace.value[best] === null || Math.abs(s - step) < Math.abs(trace.step[best] - step))) best = i; });
    return best;
  }

  function curves(panel) {
    const metrics = [...new Set(panel.traces.map((trace) => trace.metric))];
    const several = page.runs.length > 1, traces = [];
    for (const trace of panel.traces) {
      if (view.hidden.has(trace.run)) continue;
      const at = metrics.indexOf(trace.metric), name = several ? page.runs[trace.run].name : trace.metric;
      const tint = colour(`--c${(several ? trace.run : at) % 8}`);
      const label = several && metrics.length > 1 ? `${name} · ${trace.metric}` : name;
      const base = { x: trace[view.axis], name: plain(label), type: "scatter", connectgaps: false, showlegend: !several && metrics.length > 1 };
      const few = trace.step.length < 40, line = { color: tint, width: 1.9, dash: several ? DASHES[at % 5] : trace.metric.startsWith("eval_") ? "dot" : "solid" };
      if (view.smooth) traces.push({ ...base, y: trace.value, mode: "lines", line: { ...line, color: alpha(tint, 0.28), width: 1 }, hoverinfo: "skip", showlegend: false });
      traces.push({ ...base, y: smoothed(trace.value), mode: few ? "lines+markers" : "lines", line, marker: { size: trace.step.length < 3 ? 8 : 4, color: tint }, hovertemplate: "%{y:.5~g}" });
    }
    if (several && metrics.length > 1) metrics.forEach((metric, at) => traces.push({ // Colours are runs; dashes need a key of their own.
      x: [null], y: [null], name: plain(metric), type: "scatter", mode: "lines", line: { color: colour("--soft"), width: 1.9, dash: DASHES[at % 5] }, hoverinfo: "skip", showlegend: true,
    }));
    return traces;
  }

  function marks(panel) {
    const x = [], y = [], text = [], tint = [];
    for (const mark of view.marks ? panel.marks : []) {
      const trace = panel.traces.find((item) => item.run === mark.run);
      if (!trace || view.hidden.has(mark.run)) continue;
      const at = nearest(trace, mark.step);
      if (trace.value[at] === null) continue;
      x.push(view.axis === "step" ? mark.step : trace[view.axis][at]); y.push(trace.value[at]);
      text.push(`step ${mark.step}: ${wrapped(mark.text)}`);
      tint.push(colour({ error: "--bad", warning: "--warn" }[mark.severity] || "--info"));
    }
    if (!x.length) return [];
    const marker = { symbol: "diamond", size: 11, color: tint, line: { color: colour("--back"), width: 1.5 } };
    return [{ x, y, text, mode: "markers", type: "scatter", name: "finding", marker, hovertemplate: "%{text}<extra></extra>", showlegend: false }];
  }

  function shapes(panel) {
    const found = [];
    for (const item of view.marks ? panel.spans : []) {
      const trace = panel.traces.find((other) => other.run === item.run);
      if (!trace || view.hidden.has(item.run)) continue;
      const place = (step) => view.axis === "step" ? step : trace[view.axis][nearest(trace, step)];
      for (const [first, last] of item.spans) {
        const x0 = place(first), x1 = place(last);
        found.push({ type: "rect", xref: "x", yref: "paper", x0, x1, y0: 0, y1: 1, fillcolor: colour("--shade"), line: { width: x0 === x1 ? 2 : 0, color: colour("--shade") }, layer: "below" });
      }
    }
    for (const mark of view.marks ? panel.marks : []) {
      const trace = panel.traces.find((item) => item.run === mark.run);
      if (!trace || view.hidden.has(mark.run)) continue;
      const at = view.axis === "step" ? mark.step : trace[view.axis][nearest(trace, mark.step)];
      found.push({ type: "line", xref: "x", yref: "paper", x0: at, x1: at, y0: 0, y1: 1, line: { width: 1, dash: "dot", color: colour("--warn") }, layer: "below" });
    }
    return found;
  }

  const largest = (panel) => panel.largest ??= panel.traces.reduce((most, trace) => trace.value.reduce((m, v) => Math.max(m, Math.abs(v ?? 0)), most), 0);

  function layout(panel, traces) {
    const axis = { gridcolor: colour("--grid"), linecolor: colour("--line"), zeroline: false, automargin: true, tickfont: { size: 11 } };
    const positive = panel.traces.every((trace) => trace.value.every((value) => value === null || value > 0));
    return {
      margin: { l: 46, r: 12, t: 8, b: 30 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 12, color: colour("--soft") }, hovermode: "x unified", dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--text") }, namelength: 48 },
      xaxis: { ...axis, ...(view.range ? { range: view.range.slice(), autorange: false } : { autorange: true }), hoverformat: ",.4~g", ticksuffix: view.axis === "minutes" ? " min" : "" },
      yaxis: { ...axis, type: view.log && positive ? "log" : "linear", tickformat: largest(panel) > 0 && largest(panel) < 0.002 ? ".2~e" : largest(panel) >= 10000 ? ".3~s" : "~g", nticks: 6 },
      legend: { orientation: "h", y: -0.16, yanchor: "top", x: 0, font: { size: 11 } },
      showlegend: traces.some((trace) => trace.showlegend), shapes: shapes(panel),
    };
  }

  const options = { responsive: true, displaylogo: false, displayModeBar: false, doubleClick: "reset+autosize" };

  function draw(element) {
    const panel = page.panels.find((item) => item.key === element.dataset.panel);
    if (!panel) return;
    const traces = [...curves(panel), ...marks(panel)];
    const first = !drawn.has(element);
    drawn.add(element);
    Plotly.react(element, traces, layout(panel, traces), options);
    if (first) element.on("plotly_relayout", (change) => follow(element, change));
  }

  let following = false;
  function follow(element, change) { // All panels show the same stretch of the run.
    if (following) return;
    if ("xaxis.range[0]" in change) view.range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    else if (change["xaxis.autorange"]) view.range = null;
    else return;
    redraw(element);
  }

  function redraw(except) {
    following = true;
    for (const element of drawn) {
      if (!element.isConnected) drawn.delete(element);
      else if (element !== except) draw(element);
    }
    following = false;
  }

  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) { watcher.unobserve(entry.target); draw(entry.target); }
  }, { rootMargin: "800px" });

  function controls() {
    const bind = (id, event, change) => $(id) && $(id).addEventListener(event, (e) => { change(e.target); redraw(); });
    bind("#smooth", "input", (input) => { view.smooth = +input.value; input.nextElementSibling.textContent = input.value; });
    bind("#axis", "change", (input) => { view.axis = input.value; view.range = null; });
    bind("#log", "change", (input) => { view.log = input.checked; });
    bind("#marks", "change", (input) => { view.marks = input.checked; });
    bind("#reset", "click", () => { view.range = null; });
    $(".controls").addEventListener("submit", (event) => event.preventDefault());
    if (page.runs.length < 2) return;
    page.runs.forEach((run, at) => {
      const label = document.createElement("label"), box = document.createElement("input"), dot = document.createElement("i");
      box.type = "checkbox"; box.checked = true; dot.className = "dot"; dot.style.setProperty("--run", `var(--c${at % 8})`); dot.style.marginRight = "0";
      box.addEventListener("change", () => { box.checked ? view.hidden.delete(at) : view.hidden.add(at); redraw(); });
      label.append(box, dot, document.createTextNode(run.name));
      $("#runs").append(label);
    });
  }

  function timelines() {
    for (const timeline of $$(".timeline")) {
      const moments = $$(".moment", timeline), input = $("input[type=range]", timeline);
      if (!input || input.dataset.ready) continue;
      input.dataset.ready = "yes";
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
    const remembered = (() => { try { return localStorage.getItem("posttrain-theme"); } catch { return null; } })();
    if (remembered) root.dataset.theme = remembered;
    $("#theme").addEventListener("click", () => {
      const dark = root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
      root.dataset.theme = dark ? "light" : "dark";
      try { localStorage.setItem("posttrain-theme", root.dataset.theme); } catch { /* A file may not be allowed to remember. */ }
      redraw();
    });
    system.addEventListener("change", () => redraw());
  }

  // Live: sections that changed are put in place of their old selves; what was open stays open.
  const shown = new Map();
  let stamp = null;
  function replace(name, html) {
    const place = $(`[data-section="${name}"]`);
    if (!place || shown.get(name) === html) return;
    shown.set(name, html);
    if (name === "curves") {
      const keys = (root) => $$("[data-panel]", root).map((element) => element.dataset.panel).join();
      const fresh = document.createElement("div");
      fresh.innerHTML = html;
      if (keys(fresh) === keys(place)) return; // The plots stand; only what they draw is new.
    }
    const open = new Map($$("details", place).map((item) => [item.dataset.keep, item.open]));
    const sliders = $$(".timeline input", place).map((input) => (input.value === input.max ? null : input.value));
    place.innerHTML = html;
    for (const item of $$("details", place)) if (open.has(item.dataset.keep)) item.open = open.get(item.dataset.keep);
    $$(".timeline input", place).forEach((input, at) => { if (sliders[at] != null) input.value = sliders[at]; });
    for (const element of $$("[data-panel]", place)) watcher.observe(element);
  }

  async function refresh() {
    const said = $("#live");
    try {
      const answer = await fetch("live.json", { cache: "no-cache" });
      if (!answer.ok) throw new Error(answer.statusText);
      if (stamp !== null && answer.headers.get("ETag") === stamp) return;
      stamp = answer.headers.get("ETag");
      const news = await answer.json();
      for (const [name, html] of Object.entries(news.sections)) replace(name, html);
      timelines();
      page = news.data;
      redraw();
      said.textContent = "live";
    } catch { said.textContent = "the server is gone: this is what it said last"; } finally { setTimeout(refresh, 4000); }
  }

  theme();
  controls();
  timelines();
  for (const element of $$("[data-panel]")) watcher.observe(element);
  if (document.body.hasAttribute("data-live")) refresh();
})();
