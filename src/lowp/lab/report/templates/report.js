"use strict";
// The figures of a study, each from the document alone, and the start of the page.

const percent = (study) => study.metric !== "loss";
const scaled = (study, value) => value === null || value === undefined ? null : percent(study) ? 100 * value : value;
const unit = (study) => percent(study) ? `${study.metric} (%)` : study.metric;
const verdictClass = {better: "better", worse: "worse", "more seeds needed": "more"};
const verdictText = (row) => row.verdict + (row.seeds_needed ? ` (${row.seeds_needed} in all)` : "") + (row.note ? `; ${row.note}` : "");
const colourOf = (study) => new Map(study.settings.map((row, place) => [row.setting, COLOURS[place % COLOURS.length]]));

// Intervals of few seeds can be far wider than what is compared: the axis follows the means.
function padded(values) {
  const low = Math.min(...values), high = Math.max(...values), room = 0.12 * (high - low) || 0.01 * Math.abs(high) || 1;
  return [low - room, high + room];
}

// Where one setting fails, the others lie close together: a choice shows these alone, and says how many are not shown.
const ALL = "all", CLOSE = "close to the baseline";
function closeTo(values, centre) {
  const far = values.map((value) => Math.abs(value - centre)).sort((a, b) => a - b);
  const reach = 4 * (far[Math.floor(far.length / 2)] || far.at(-1) || 1);
  return {reach, beyond: far.filter((each) => each > reach).length};
}
function rangeChoice(close, change) {
  return close.beyond ? [choice("Range", [ALL, `${CLOSE}, without ${close.beyond}`], (name) => change(name !== ALL))] : [];
}

function paretoFigure(parent, study, prefix) {
  const known = study.settings.filter((row) => row.mean !== null && row.bytes_sent !== null);
  if (!known.length) return;
  const front = new Set(study.pareto);
  const onFront = study.pareto.map((name) => known.find((row) => row.setting === name)).filter(Boolean);
  const x = (row) => Math.max(row.bytes_sent, 1);
  const verdicts = Object.keys(SYMBOLS);
  const means = known.map((row) => scaled(study, row.mean));
  const base = scaled(study, known.find((row) => row.setting === study.baseline)?.mean ?? known[0].mean);
  const close = closeTo(means, base);
  let near = false;
  const made = figure(parent, {
    id: `${prefix}-pareto`, title: `${study.metric[0].toUpperCase()}${study.metric.slice(1)} against bytes on the wire`,
    sentence: "Each mark is a setting: its mean over seeds with a 95 % interval, against the bytes that one rank sent; the line joins the settings that no other one beats in both.",
    controls: rangeChoice(close, (chosen) => { near = chosen; made.draw(); }),
    rows: () => known.map((row) => ({setting: row.setting, bytes_sent: row.bytes_sent, n: row.n, mean: row.mean, low: row.low,
      high: row.high, verdict: row.verdict, pareto: front.has(row.setting)})),
    traces: (colours) => [
      {type: "scatter", mode: "lines", name: "Pareto front", x: onFront.map(x), y: onFront.map((row) => scaled(study, row.mean)),
        line: {color: colours.soft, dash: "dot", shape: "hv"}, hoverinfo: "skip"},
      ...verdicts.map((verdict) => {
        const own = known.filter((row) => row.verdict === verdict);
        return {type: "scatter", mode: "markers", name: verdict, x: own.map(x), y: own.map((row) => scaled(study, row.mean)),
          text: own.map((row) => row.setting), hovertemplate: "%{text}<br>%{y:.2f}, %{x:.3s}B<extra></extra>",
          marker: {symbol: SYMBOLS[verdict], size: 11, color: colours.verdicts[verdict], line: {width: 1.5, color: colours.verdicts[verdict]}},
          error_y: {type: "data", array: own.map((row) => row.low === null ? 0 : scaled(study, row.mean - row.low)), color: colours.line, thickness: 1}};
      }).filter((trace) => trace.x.length)],
    layout: () => ({xaxis: {type: "log", title: {text: "bytes sent by a rank"}, tickformat: "~s", dtick: "D2"},
      yaxis: {title: {text: unit(study)}, range: near ? [base - close.reach, base + close.reach] : padded(means)}}),
  });
}

function curvesFigure(parent, study, prefix) {
  const names = Object.keys(study.curves).filter((name) => study.curves[name].length);
  if (!names.length) return;
  let chosen = names[0];
  const factor = () => chosen.includes("accuracy") ? 100 : 1;
  const colourFor = colourOf(study);
  const all = study.settings.map((row) => row.setting);
  const shown = new Set([study.baseline, ...all.slice(0, 6)]);
  const made = figure(parent, {
    id: `${prefix}-curves`, title: "Curves", height: 460,
    sentence: "Each line is the mean of a setting over its seeds, and the band reaches from the lowest to the highest seed; the baseline is the thick line.",
    controls: [choice("Figure", names, (name) => { chosen = name; made.draw(); }),
      ticks("Settings that are shown", all, shown, (name) => colourFor.get(name), () => made.draw())],
    rows: () => study.curves[chosen].flatMap((curve) => curve.step.map((step, i) => ({setting: curve.setting, figure: chosen, step,
      n: curve.n[i], mean: curve.mean[i], low: curve.low[i], high: curve.high[i]}))),
    traces: () => study.curves[chosen].filter((curve) => shown.has(curve.setting)).flatMap((curve) => {
      const colour = colourFor.get(curve.setting), times = factor(), place = all.indexOf(curve.setting);
      const many = Math.max(...curve.n) > 1;
      const band = {type: "scatter", mode: "lines", x: [...curve.step, ...[...curve.step].reverse()],
        y: [...curve.high, ...[...curve.low].reverse()].map((value) => times * value), fill: "toself", fillcolor: colour + "30",
        line: {width: 0}, hoverinfo: "skip", showlegend: false};
      const line = {type: "scatter", mode: "lines+markers", name: curve.setting, x: curve.step,
        y: curve.mean.map((value) => times * value), marker: {size: 4},
        line: {color: colour, width: curve.setting === study.baseline ? 4 : 2, dash: ["solid", "dash", "dot"][Math.floor(place / COLOURS.length) % 3]}};
      return many ? [band, line] : [line];
    }),
    layout: () => ({showlegend: false, xaxis: {title: {text: "step"}}, yaxis: {title: {text: chosen + (factor() === 100 ? " (%)" : "")}}}),
  });
}

function settingsTable(parent, study, prefix) {
  const value = (key) => (row) => row[key];
  const interval = (low, high) => low === null ? "-" : `${number(scaled(study, low))} .. ${number(scaled(study, high))}`;
  table(parent, {
    id: `${prefix}-settings`, title: "Settings", rows: study.settings,
    sentence: `Each row is a setting with its mean over n seeds, its difference to ${study.baseline} paired by seed, and what can be said about it, corrected for the number of comparisons (Holm).`,
    rowClass: (row) => row.verdict === "baseline" ? "baseline" : "",
    columns: [
      {name: "setting", value: value("setting")},
      {name: "n", number: true, value: value("n"), text: (row) => `${row.n}/${row.planned}`},
      {name: unit(study), number: true, value: value("mean"), text: (row) => number(scaled(study, row.mean))},
      {name: "95 % interval", number: true, value: value("low"), text: (row) => interval(row.low, row.high)},
      {name: "difference", number: true, value: value("difference"), text: (row) => number(scaled(study, row.difference), 3)},
      {name: "95 % interval of it", number: true, value: value("difference_low"), text: (row) => interval(row.difference_low, row.difference_high)},
      {name: "verdict", value: value("verdict"), text: verdictText, class: (row) => verdictClass[row.verdict] ?? ""},
      {name: "p (difference)", number: true, value: value("p_difference"), text: (row) => number(row.p_difference, 2)},
      {name: "sent by a rank", number: true, value: value("bytes_sent"), text: (row) => bytes(row.bytes_sent)},
      {name: "of fp32", number: true, value: value("share_of_fp32"), text: (row) => row.share_of_fp32 === null ? "-" : `${number(100 * row.share_of_fp32, 3)} %`},
      {name: "ms a step", number: true, value: value("step_ms"), text: (row) => number(row.step_ms, 3)},
      {name: "diverged", number: true, value: value("diverged")},
      {name: "failed", number: true, value: value("failed")},
    ],
  });
}

function forestFigure(parent, study, prefix) {
  const known = study.settings.filter((row) => row.difference !== null);
  if (!known.length) return;
  const sorted = [...known].sort((a, b) => (a.difference - b.difference) * (study.higher_is_better ? 1 : -1));
  const margin = scaled(study, known[0].margin);
  const close = closeTo(sorted.map((row) => scaled(study, row.difference)), 0);
  let near = false;
  const made = figure(parent, {
    id: `${prefix}-forest`, title: "Differences to the baseline", height: 140 + 22 * sorted.length,
    sentence: `Each row is the mean difference of a setting to ${study.baseline}, paired by seed, with its 95 % interval; within the shaded margin a difference counts as noise.`,
    controls: rangeChoice(close, (chosen) => { near = chosen; made.draw(); }),
    rows: () => sorted.map((row) => ({setting: row.setting, pairs: row.pairs, difference: row.difference, low: row.difference_low,
      high: row.difference_high, p_difference: row.p_difference, p_within: row.p_within, margin: row.margin, verdict: row.verdict})),
    traces: (colours) => Object.keys(SYMBOLS).map((verdict) => {
      const own = sorted.filter((row) => row.verdict === verdict);
      return {type: "scatter", mode: "markers", name: verdict, y: own.map((row) => row.setting), x: own.map((row) => scaled(study, row.difference)),
        hovertemplate: "%{y}<br>%{x:.3f}<extra></extra>", marker: {symbol: SYMBOLS[verdict], size: 9, color: colours.verdicts[verdict]},
        error_x: {type: "data", symmetric: true, array: own.map((row) => row.difference_low === null ? 0 : scaled(study, row.difference - row.difference_low)),
          color: colours.verdicts[verdict], thickness: 1.5}};
    }).filter((trace) => trace.x.length),
    layout: (colours) => ({margin: {l: 20, r: 12, t: 12, b: 48},
      xaxis: {title: {text: `difference in ${unit(study)}`}, zeroline: true, zerolinecolor: colours.ink,
        ...(near ? {range: [-close.reach, close.reach]} : {autorange: true})},
      yaxis: {type: "category", categoryorder: "array", categoryarray: sorted.map((row) => row.setting), tickfont: {size: 11}},
      shapes: margin ? [{type: "rect", xref: "x", yref: "paper", x0: -margin, x1: margin, y0: 0, y1: 1, line: {width: 0}, fillcolor: colours.soft, opacity: 0.15}] : []}),
  });
}

function recipesTable(parent, study, prefix) {
  const {settings, keys} = study.recipes;
  const names = Object.keys(keys);
  if (!names.length) return;
  const rows = settings.map((setting, place) => ({setting, ...Object.fromEntries(names.map((key) => [key, keys[key][place]]))}));
  table(parent, {
    id: `${prefix}-recipes`, title: "What differs between the recipes", rows,
    sentence: "Each row is a setting, each column a key of the recipe that is not the same in all settings.",
    columns: [{name: "setting", value: (row) => row.setting}, ...names.map((key) => ({name: key, value: (row) => row[key]}))],
  });
}

function stackedFigure(parent, {id, title, sentence, rows, groups, label}) {
  const keys = [...new Set(groups.flatMap((group) => group.bars.flatMap((bar) => Object.keys(bar.parts))))];
  const bars = groups.flatMap((group) => group.bars.map((bar) => ({name: bar.name ? `${group.name} (${bar.name})` : group.name, parts: bar.parts})));
  figure(parent, {
    id, title, sentence, rows, height: 140 + 20 * bars.length,
    traces: () => keys.map((key, place) => ({type: "bar", orientation: "h", name: key, y: bars.map((bar) => bar.name),
      x: bars.map((bar) => bar.parts[key] ?? 0), marker: {color: COLOURS[place % COLOURS.length]}})),
    layout: () => ({barmode: "stack", margin: {l: 20, r: 12, t: 12, b: 48}, xaxis: {title: {text: label}},
      yaxis: {type: "category", autorange: "reversed", tickfont: {size: 11}}}),
  });
}

function timesFigure(parent, study, prefix) {
  const known = study.times.filter((each) => Object.keys(each.measured_ms).length);
  if (!known.length) return;
  const predicted = known.some((each) => Object.keys(each.predicted_ms).length);
  const beside = predicted ? ` Beside it, the step that lowp predict gives for as many real ranks on the cluster ${study.cluster}: computing, encoding, decoding, and what of the exchange is waited for.` : "";
  const why = study.not_predicted ? ` Not predicted: ${study.not_predicted}.` : "";
  stackedFigure(parent, {
    id: `${prefix}-times`, title: "Where a step's time goes", label: "milliseconds a step",
    sentence: `Each bar is the median step of a setting as measured here, by phase; virtual ranks are computed one after the other in one process.${beside}${why}`,
    rows: () => known.flatMap((each) => [["measured", each.measured_ms], ["predicted", each.predicted_ms]].flatMap(([kind, parts]) =>
      Object.entries(parts).map(([phase, ms]) => ({setting: each.setting, kind, phase, milliseconds: ms})))),
    groups: known.map((each) => ({name: each.setting, bars: [{name: predicted ? "measured" : "", parts: each.measured_ms},
      ...(Object.keys(each.predicted_ms).length ? [{name: "predicted", parts: Object.fromEntries(Object.entries(each.predicted_ms).map(([key, ms]) => [`${key}, predicted`, ms]))}] : [])]})),
  });
}

function memoryFigure(parent, study, prefix) {
  const known = study.memory.filter((each) => Object.keys(each.bytes).length);
  if (!known.length) return;
  stackedFigure(parent, {
    id: `${prefix}-memory`, title: "Memory by role", label: "bytes",
    sentence: "Each bar is the memory of a setting that lasts from step to step, by what it holds.",
    rows: () => known.flatMap((each) => Object.entries(each.bytes).map(([role, count]) => ({setting: each.setting, role, bytes: count}))),
    groups: known.map((each) => ({name: each.setting, bars: [{name: "", parts: each.bytes}]})),
  });
}

function troubleTable(parent, study, prefix) {
  if (!study.trouble.length) return;
  table(parent, {
    id: `${prefix}-trouble`, title: "Where runs went wrong", rows: study.trouble,
    sentence: "Each row is a run that diverged, failed or was killed, with the layer, the step and the rank, where they are known.",
    columns: ["run", "state", "step", "layer", "rank", "message"].map((name) => ({name, number: name === "step" || name === "rank", value: (row) => row[name]})),
  });
}

const HEALTH = {underflow: "share that became 0", overflow: "share beyond the format", sqnr_db: "SQNR (dB)", lost_updates: "share of the update that was lost"};

function healthFigures(parent, study, prefix) {
  if (!study.health.length) return;
  const lostMost = (each) => Math.max(0, ...each.rows.flatMap((row) => [row.underflow, row.overflow]).flat().filter((value) => value !== null));
  const worst = study.health.reduce((one, other) => lostMost(other) > lostMost(one) ? other : one);
  const state = {run: worst.run, role: "", figure: "underflow", layer: ""};
  const run = () => study.health.find((each) => each.run === state.run);
  const roles = () => [...new Set(run().rows.map((row) => row.role))];
  const rows = () => run().rows.filter((row) => row.role === state.role);
  const values = (row) => Array.isArray(row[state.figure]) ? row[state.figure] : run().steps.map(() => row[state.figure]);
  const controls = element("div", {class: "controls"});
  const layerChoice = element("div", {class: "controls"});
  function settle() {
    if (!roles().includes(state.role)) state.role = roles().includes("sent") ? "sent" : roles()[0];
    if (!rows().some((row) => row.layer === state.layer)) state.layer = rows()[0].layer;
    const again = (key) => (value) => { state[key] = value; settle(); heat.draw(); histogram.draw(); };
    controls.replaceChildren(choice("Run", study.health.map((each) => each.run), again("run"), state.run),
      choice("Role", roles(), again("role"), state.role), choice("Figure", Object.keys(HEALTH), again("figure"), state.figure));
    layerChoice.replaceChildren(choice("Layer", rows().map((row) => row.layer), again("layer"), state.layer));
  }
  const left = study.health_left_out ? ` The health of ${study.health_left_out} more runs is left out for size: lowp report RUN shows it.` : "";
  const heat = figure(parent, {
    id: `${prefix}-health`, title: "Numeric health by layer over time", controls: [controls], height: 460,
    sentence: `Each cell is a layer at a sampled step: what rounding to the format of the role did to its numbers.${left}`,
    rows: () => study.health.flatMap((each) => each.rows.flatMap((row) => each.steps.map((step, i) => ({run: each.run, role: row.role, layer: row.layer,
      format: row.format, step, ...Object.fromEntries(Object.keys(HEALTH).map((key) => [key, Array.isArray(row[key]) ? row[key][i] : row[key]]))})))),
    traces: () => [{type: "heatmap", x: run().steps.map(String), y: rows().map((row) => row.layer), z: rows().map(values),
      text: rows().map((row) => run().steps.map(() => row.format)), hovertemplate: "layer %{y}, step %{x}<br>%{z:.4g} in %{text}<extra></extra>",
      colorscale: "Viridis", ...(state.figure === "sqnr_db" ? {} : {zmin: 0, zmax: Math.max(1e-6, ...rows().flatMap(values).filter((value) => value !== null))}), reversescale: state.figure === "sqnr_db", colorbar: {title: {text: HEALTH[state.figure], side: "right"}, thickness: 12}}],
    layout: () => ({height: 160 + 22 * rows().length, xaxis: {type: "category", title: {text: "step"}},
      yaxis: {type: "category", autorange: "reversed", tickfont: {size: 11}}}),
  });
  const histogram = figure(parent, {
    id: `${prefix}-exponents`, title: "Exponents over time", controls: [layerChoice],
    sentence: "Each line is how many of a layer's sampled numbers lie between 2^e and 2^(e+1), at one step; lighter lines are earlier.",
    rows: () => rows().filter((row) => row.layer === state.layer).flatMap((row) => run().steps.flatMap((step, i) =>
      (row.exponents[i] ?? []).slice(1).map((count, place) => ({run: state.run, role: row.role, layer: row.layer, step, exponent: row.exponents[i][0] + place, count})))),
    traces: () => {
      const row = rows().find((each) => each.layer === state.layer);
      return run().steps.map((step, i) => ({step, found: row.exponents[i]})).filter((each) => each.found).map(({step, found}, place, all) => ({
        type: "scatter", mode: "lines", name: `step ${step}`, x: found.slice(1).map((_, k) => found[0] + k), y: found.slice(1),
        line: {shape: "hvh", color: COLOURS[0]}, opacity: 0.25 + 0.75 * (place + 1) / all.length}));
    },
    layout: () => ({xaxis: {title: {text: `exponent e (${state.role}, layer ${state.layer})`}}, yaxis: {title: {text: "numbers"}}}),
  });
  settle();
}

function runsTable(parent, study, prefix) {
  table(parent, {
    id: `${prefix}-runs`, title: "Runs", rows: study.runs, sentence: "Each row is a run with its state and the figures of its last test.",
    columns: [
      ...["setting", "seed", "run", "state"].map((name) => ({name, number: name === "seed", value: (row) => row[name]})),
      {name: "accuracy (%)", number: true, value: (row) => row.accuracy, text: (row) => row.accuracy === null ? "-" : number(100 * row.accuracy)},
      {name: "loss", number: true, value: (row) => row.loss, text: (row) => number(row.loss)},
      {name: "sent", number: true, value: (row) => row.bytes_sent, text: (row) => bytes(row.bytes_sent)},
      {name: "seconds", number: true, value: (row) => row.seconds, text: (row) => number(row.seconds, 3)},
      {name: "reason", value: (row) => row.reason, text: (row) => row.reason || ""},
    ],
  });
}

function contents() {
  const list = document.getElementById("contents");
  for (const frame of document.querySelectorAll("figure")) {
    list.append(element("a", {href: `#${frame.id}`}, frame.querySelector("h3").textContent));
  }
}

function chooseTheme(name) {
  document.documentElement.dataset.theme = name;
  drawn.forEach((draw) => draw());
}

async function unpackPlotly() {
  const packed = Uint8Array.from(atob(document.getElementById("plotly-packed").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  document.head.append(element("script", {}, await new Response(stream).text()));
}

async function begin() {
  await unpackPlotly();
  report.studies.forEach((study, place) => {
    const parent = document.querySelector(`[data-study="${place}"]`), prefix = `s${place}`;
    for (const part of [paretoFigure, curvesFigure, settingsTable, forestFigure, recipesTable, troubleTable, healthFigures, timesFigure, memoryFigure, runsTable]) {
      part(parent, study, prefix);
    }
  });
  explorer(document.getElementById("explorer"));
  contents();
  const dark = matchMedia("(prefers-color-scheme: dark)");
  chooseTheme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => chooseTheme(dark.matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click", () => chooseTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  document.documentElement.dataset.ready = "yes";
  if (report.stamp) watch();
}

// `lowp view` tells when there is something new. What the reader typed or chose would be lost: so the page is loaded again only
// when nobody is at a control.
function watch() {
  setInterval(async () => {
    try {
      const state = await (await fetch("state")).json();
      const busy = document.activeElement && document.activeElement.matches("input, select");
      if (state.stamp !== report.stamp && !busy) location.reload();
    } catch { /* the server has ended: the page stays as it is */ }
  }, 3000);
}

begin();
