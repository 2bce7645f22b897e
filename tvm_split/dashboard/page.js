"use strict";
// Draws the page from the values of `Page`. All names are untrusted: they become text, never HTML.
(() => {
  const element = (id) => document.getElementById(id);
  const KINDS = {
    compute: "computing", wait: "waiting for an input", block: "blocked: no room for an output",
    receive: "receiving", send: "sending",
  };
  const MARKUP = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
  // plotly.js reads its labels as HTML.
  const plain = (text) => String(text).replace(/[&<>"']/g, (letter) => MARKUP[letter]);

  const node = (tag, text, className) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  };
  const digits = (value, count = 3) => {
    const rounded = Number(value.toPrecision(count));
    return Math.abs(rounded) >= 1e-4 && Math.abs(rounded) < 1e15 ? rounded.toLocaleString("en", { maximumSignificantDigits: count }) : String(rounded);
  };
  const inUnit = (value, units) => {
    const [size, name] = units.find(([least]) => value >= least) || units[units.length - 1];
    return `${digits(value / size)}\u00a0${name}`;
  };
  const seconds = (value) => value == null ? "–" : value === 0 ? "0 s" : inUnit(value, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]]);
  const bytes = (value) => value == null ? "–" : inUnit(value, [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]);
  const share = (value) => `${Math.round(100 * value)}%`;
  const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
  const rate = (period) => period ? digits(1 / period) : "–";

  const bar = (shares) => {
    const whole = node("div", undefined, "bar");
    whole.setAttribute("aria-hidden", "true");
    for (const [kind, value] of shares) {
      const part = node("span", undefined, kind);
      part.style.width = `${Math.min(100 * value, 100)}%`;
      whole.append(part);
    }
    return whole;
  };

  const tile = (title, value, beside) => {
    const whole = node("div");
    whole.append(node("dt", title), node("dd", value), node("dd", beside || "\u00a0", "beside"));
    return whole;
  };

  function drawNumbers(page) {
    const { period_seconds: period, latency_seconds: latency } = page;
    const ratio = period.predicted && period.measured ? `; measured is ${digits(period.predicted / period.measured, 2)} of it` : "";
    const alone = latency.predicted ? `; predicted for one alone ${seconds(latency.predicted)}` : "";
    const under = latency.p50 ? `90%: ${seconds(latency.p90)}, 99%: ${seconds(latency.p99)}${alone}` : "";
    element("numbers").replaceChildren(
      tile("Results per second", rate(period.measured), period.predicted ? `predicted ${rate(period.predicted)}${ratio}` : "no prediction"),
      tile("Time between results", seconds(period.measured), period.predicted ? `predicted ${seconds(period.predicted)}` : ""),
      tile("From input to result, median", seconds(latency.p50), under),
      tile(page.state === "recorded" ? "Results recorded" : "Results of the last ten minutes", page.results.toLocaleString("en"), page.rates.length ? `in ${seconds(page.rates[page.rates.length - 1][0] - page.rates[0][0])}` : ""),
    );
  }

  function machineCard(machine, page) {
    const isOpen = element("machines").querySelector(`details[data-machine="${CSS.escape(machine.machine)}"]`)?.open;
    const card = node("article", undefined, "machine");
    if (!machine.answers) card.classList.add("gone");
    const title = node("h3", `${machine.machine} `);
    const limits = page.limiting.length === 1 && page.limiting[0] === machine.machine;
    if (limits) card.classList.add("limits");
    title.append(node("span", !machine.answers ? "does not answer" : limits ? "limits" : ""));
    card.append(title);
    if (machine.answers) {
      const { compute = 0, wait = 0, block = 0, receive = 0, send = 0 } = machine.shares;
      card.append(bar([["compute", compute], ["wait", wait], ["block", block]]));
      card.append(node("p", `computes ${share(compute)} of the time, waits ${share(wait)}, is blocked ${share(block)}; receives ${share(receive)}, sends ${share(send)}`));
      if (machine.measured_seconds) {
        const predicted = machine.predicted_seconds ? `, predicted ${seconds(machine.predicted_seconds)}` : "";
        card.append(node("p", `computing ${seconds(machine.measured_seconds)} per micro-batch${predicted}`));
      }
    }
    const facts = [];
    if (machine.processor_cores != null && machine.answers) facts.push(machine.cores ? `processor ${share(machine.processor_cores / machine.cores)} of ${count(machine.cores, "core")}` : `${digits(machine.processor_cores, 2)} cores busy`);
    if (machine.memory_total_bytes) facts.push(`${bytes(machine.memory_free_bytes)} of ${bytes(machine.memory_total_bytes)} memory free`);
    if (machine.clock_error_seconds) facts.push(`clock ±${seconds(machine.clock_error_seconds)}`);
    if (facts.length) card.append(node("p", facts.join("; ")));
    if (machine.stages.length) card.append(layers(machine, isOpen));
    return card;
  }

  function layers(machine, isOpen) {
    const details = node("details");
    details.dataset.machine = machine.machine;
    details.open = Boolean(isOpen);
    const all = machine.stages.flatMap(([, names]) => names);
    const range = all.length > 1 ? `: ${all[0]} … ${all[all.length - 1]}` : all.length ? `: ${all[0]}` : "";
    details.append(node("summary", `${count(all.length, "layer")} in ${count(machine.stages.length, "stage")}${range}`));
    const list = node("ul");
    list.tabIndex = 0;  // so that the keyboard can scroll it
    for (const [stage, names] of machine.stages) list.append(node("li", `${stage}: ${names.join(", ")}`));
    details.append(list);
    return details;
  }

  function drawMachines(page) {
    const focused = document.activeElement?.closest?.("details")?.dataset.machine;
    element("machines").replaceChildren(...page.machines.map((machine) => machineCard(machine, page)));
    if (focused !== undefined) element("machines").querySelector(`details[data-machine="${CSS.escape(focused)}"] summary`)?.focus();
    element("shares").replaceChildren(...Object.entries(KINDS).map(([kind, words]) => {
      const item = node("li");
      item.append(node("i", undefined, kind), words);
      return item;
    }));
  }

  function drawLinks(page) {
    const head = node("tr");
    for (const title of ["link", "busy", "per micro-batch", "takes", "predicted"]) {
      const cell = node("th", title);
      cell.scope = "col";
      head.append(cell);
    }
    const rows = page.links.map((link) => {
      const row = node("tr");
      if (page.limiting.length === 2 && page.limiting[0] === link.source && page.limiting[1] === link.destination) row.className = "limits";
      row.append(node("td", `${link.source} → ${link.destination}`), node("td", share(link.share)), node("td", bytes(link.size_bytes)), node("td", seconds(link.measured_seconds)), node("td", seconds(link.predicted_seconds)));
      return row;
    });
    const top = node("thead");
    top.append(head);
    const body = node("tbody");
    body.append(...rows);
    element("links").replaceChildren(top, body);
  }

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  function layout(height, more) {
    const axis = { gridcolor: colour("line"), zerolinecolor: colour("line"), color: colour("quiet"), fixedrange: true };
    return {
      height, margin: { l: 8, r: 8, t: 8, b: 40 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colour("ink"), family: "system-ui, sans-serif" }, showlegend: false,
      xaxis: { ...axis, automargin: true, ...more.xaxis }, yaxis: { ...axis, automargin: true, ...more.yaxis }, ...more.rest,
    };
  }
  const CONFIG = { displayModeBar: false, responsive: true };

  function drawRates(page) {
    const times = page.rates.map(([at]) => at);
    const traces = [{
      x: times, y: page.rates.map(([, value]) => value), type: "scatter", mode: times.length > 1 ? "lines" : "markers",
      name: "measured", line: { color: colour("compute"), width: 2 }, hovertemplate: "%{y:.4g} a second at %{x:.1f} s<extra></extra>",
    }];
    const predicted = page.period_seconds.predicted;
    const annotations = [];
    if (predicted && times.length) {
      traces.push({ x: [times[0], times[times.length - 1]], y: [1 / predicted, 1 / predicted], type: "scatter", mode: "lines", name: "predicted", line: { color: colour("block"), dash: "dash" }, hoverinfo: "skip" });
      annotations.push({ x: 1, xref: "paper", xanchor: "right", y: 1 / predicted, yanchor: "bottom", text: "predicted", showarrow: false, font: { color: colour("quiet") } });
    }
    Plotly.react("rates", traces, layout(240, { xaxis: { title: { text: "seconds" } }, yaxis: { rangemode: "tozero" }, rest: { annotations } }), CONFIG);
  }

  function drawTimeline(page) {
    const first = Math.min(...page.bars.map(([, , begin]) => begin));
    const traces = Object.keys(KINDS).map((kind) => {
      const bars = page.bars.filter(([, own]) => own === kind);
      return {
        type: "bar", orientation: "h", name: KINDS[kind], marker: { color: colour(kind), line: { color: colour("ground"), width: 0.5 } },
        y: bars.map(([lane]) => plain(page.lanes[lane])), base: bars.map(([, , begin]) => (begin - first) * 1e3), x: bars.map(([, , , duration]) => duration * 1e3),
        text: bars.map(([, , , , sequence]) => kind === "compute" ? String(sequence) : ""), textposition: "inside", insidetextanchor: "middle", textangle: 0,
        constraintext: "inside",
        hovertext: bars.map(([, , , duration, sequence, stage, peer]) => plain(`${KINDS[kind]}: micro-batch ${sequence}${stage ? `, ${stage}` : ""}${peer ? `, ${peer}` : ""}, ${seconds(duration)}`)),
        hoverinfo: "text",
      };
    });
    const [from, to] = page.limiting;
    const limiting = !from ? [] : to === undefined ? [`${from} compute`] : [`${from} send`, `${to} receive`];
    const yaxis = {
      type: "category", categoryorder: "array", categoryarray: page.lanes.map(plain).reverse(), tickmode: "array", tickvals: page.lanes.map(plain),
      ticktext: page.lanes.map((lane) => limiting.includes(lane) ? `<b>${plain(lane)}</b>` : plain(lane)),
    };
    const xaxis = { title: { text: "milliseconds" } };
    Plotly.react("timeline", traces, layout(80 + 26 * page.lanes.length, { xaxis, yaxis, rest: { barmode: "overlay", bargap: 0.15, uniformtext: { minsize: 8, mode: "hide" } } }), CONFIG);
  }

  function drawEvents(page) {
    const items = page.events.slice().reverse().map(([at, text]) => {
      const item = node("li");
      item.append(node("time", seconds(at)), text);
      return item;
    });
    element("events").replaceChildren(...(items.length ? items : [node("li", "none yet")]));
  }

  const TROUBLE = ["failed", "ended", "lost", "recovering"];
  function headline(page) {
    if (!["failed", "ended"].includes(page.state)) return page.limit;
    const gone = page.machines.filter((machine) => !machine.answers).map((machine) => machine.machine);
    const who = gone.length ? `${gone.join(", ")} ${gone.length === 1 ? "does" : "do"} not answer: the` : "The";
    return `${who} deployment has ${page.state}.`;
  }
  function setState(state, words) {
    document.body.classList.toggle("trouble", TROUBLE.includes(state));
    document.body.dataset.state = state;
    if (element("state").textContent !== words) element("state").textContent = words;
  }

  let shown = null;
  function draw(page) {
    shown = page;
    document.title = `${page.model || "tvm-split"}: ${page.state}`;
    element("model").textContent = page.model || "tvm-split";
    setState(page.state, page.state);
    element("limit").textContent = headline(page);
    element("reason").textContent = page.reason;
    element("reason").hidden = !page.reason;
    element("numbers-title").textContent = { running: "Now", recorded: "The whole run" }[page.state] || "Before that";
    drawNumbers(page);
    drawMachines(page);
    drawLinks(page);
    drawRates(page);
    drawTimeline(page);
    drawEvents(page);
    document.body.dataset.drawn = "true";
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => shown && draw(shown));

  const saved = element("page-values");
  if (saved) {
    draw(JSON.parse(saved.textContent));
    return;
  }
  let paused = false;
  const button = element("pause");
  button.hidden = false;
  button.addEventListener("click", () => {
    paused = !paused;
    button.setAttribute("aria-pressed", String(paused));
    button.textContent = paused ? "Resume" : "Pause";
    if (paused) setState("paused", "paused");
  });
  async function follow() {
    let wait = 1;
    if (!paused && !document.hidden) {
      try {
        const reply = await fetch("page.json", { cache: "no-store", signal: AbortSignal.timeout(30000) });
        if (!reply.ok) throw new Error(`status ${reply.status}`);
        const page = await reply.json();
        if (!paused) draw(page);
        wait = page.refresh_seconds;
      } catch {
        setState("lost", "no answer: the process that serves this page has ended, or cannot be reached");
      }
    }
    setTimeout(follow, 1000 * wait);
  }
  follow();
})();
