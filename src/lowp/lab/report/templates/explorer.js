"use strict";
// The format explorer: values on a number line, relative error across the range, and where a run's numbers lie in it.

const EXPLORER_ROLES = ["weights", "activations", "errors", "gradients", "sent", "updates", "states"];

// All histograms of a run and role together, by exponent.
function exponentsOf(health, role) {
  const counts = new Map();
  for (const row of health ? health.rows.filter((each) => each.role === role) : []) {
    for (const found of row.exponents) {
      (found ?? []).slice(1).forEach((count, place) => counts.set(found[0] + place, (counts.get(found[0] + place) ?? 0) + count));
    }
  }
  return counts;
}

// What would be lost without a scale: numbers below half of the smallest value become 0, those beyond the largest overflow.
// A histogram knows binades: one through which a border runs counts by the part of it that lies beyond.
function losses(format, counts) {
  let total = 0, under = 0, over = 0;
  for (const [exponent, count] of counts) {
    const low = 2 ** exponent, part = (border) => Math.min(1, Math.max(0, border / low - 1));
    total += count;
    under += count * part(format.smallest / 2);
    over += count * (1 - part(format.max));
  }
  return {total, under: total ? under / total : 0, over: total ? over / total : 0};
}

function explorer(parent) {
  const health = report.studies.flatMap((study) => study.health);
  const names = report.formats.map((format) => format.name);
  const first = ["e5m2", "e4m3fn", "int8"].filter((name) => names.includes(name));
  const state = {formats: first.length ? first : names.slice(0, 2), run: health.length ? health[0].run : "", role: "gradients"};
  const chosen = () => state.formats.map((name) => report.formats.find((format) => format.name === name));
  const counts = () => exponentsOf(health.find((each) => each.run === state.run), state.role);
  const picks = [0, 1, 2].map((place) => choice(`Format ${place + 1}`, ["(none)", ...names], (name) => {
    picked[place] = name; state.formats = [...new Set(picked.filter((each) => each !== "(none)"))]; redraw();
  }, state.formats[place] ?? "(none)"));
  const picked = [0, 1, 2].map((place) => state.formats[place] ?? "(none)");
  const controls = [...picks];
  if (health.length) {
    const roles = () => EXPLORER_ROLES.filter((role) => health.find((each) => each.run === state.run).rows.some((row) => row.role === role));
    controls.push(choice("Run", health.map((each) => each.run), (name) => { state.run = name; redraw(); }));
    if (!roles().includes(state.role)) state.role = roles()[0];
    controls.push(choice("Role", roles(), (name) => { state.role = name; redraw(); }, state.role));
  }
  const histogram = (colours) => {
    const found = [...counts()].sort((a, b) => a[0] - b[0]);
    if (!found.length) return [];
    const most = Math.max(...found.map((each) => each[1]));
    return [{type: "bar", name: `${state.role} of ${state.run}`, x: found.map((each) => 1.5 * 2 ** each[0]), width: found.map((each) => 2 ** each[0]),
      y: found.map((each) => each[1] / most), yaxis: "y2", marker: {color: colours.soft, opacity: 0.3}, hovertemplate: "%{x:.3g}<extra></extra>"}];
  };
  // Log axes of Plotly take the exponent of ten. With a run, the range is that of its numbers and of the formats.
  const range = () => {
    const all = [...counts()], total = all.reduce((sum, each) => sum + each[1], 0);
    const found = all.filter((each) => each[1] >= 1e-5 * total).map((each) => each[0]);
    const lows = [...chosen().map((format) => format.smallest), ...found.map((e) => 2 ** e)];
    const highs = [...chosen().map((format) => format.max), ...found.map((e) => 2 ** (e + 1))];
    return [Math.max(-20, Math.log10(Math.min(...lows)) - 0.3), Math.min(20, Math.log10(Math.max(...highs)) + 0.3)];
  };
  const axis2 = {overlaying: "y", side: "right", showgrid: false, showticklabels: false, range: [0, 1.6]};
  const marks = (format) => format.values.length ? format.values : format.binades.map((exponent) => 2 ** exponent);
  const line = figure(parent, {
    id: "explorer-line", title: "Values on a number line", controls, height: 300, command: "lowp formats FORMAT",
    sentence: "Each tick is a positive value of a format, or for wide formats the start of a binade; grey bars are where the numbers of the chosen run and role lie.",
    rows: () => chosen().flatMap((format) => marks(format).map((value) => ({format: format.name, value}))),
    traces: (colours) => [...histogram(colours), ...chosen().map((format, place) => ({type: "scatter", mode: "markers", name: format.name, x: marks(format),
      y: marks(format).map(() => format.name), marker: {symbol: "line-ns-open", size: 18, color: COLOURS[place], line: {width: 1.5, color: COLOURS[place]}},
      hovertemplate: "%{x:.6g}<extra></extra>"}))],
    layout: () => ({xaxis: {type: "log", title: {text: "magnitude"}, range: range(), exponentformat: "power"},
      yaxis: {type: "category", autorange: "reversed"}, yaxis2: axis2, barmode: "overlay"}),
  });
  const error = figure(parent, {
    id: "explorer-error", title: "Relative error across the range", command: "lowp formats FORMAT FORMAT --plot formats.png",
    sentence: "Each line is the worst relative error of rounding to nearest in each binade of a format; it ends where the format ends.",
    rows: () => chosen().flatMap((format) => format.error_from.map((from, i) => ({format: format.name, from, error: format.error[i]}))),
    traces: (colours) => [...histogram(colours), ...chosen().map((format, place) => ({type: "scatter", mode: "lines", name: format.name,
      x: [...format.error_from, format.max], y: [...format.error, format.error.at(-1)].map((each) => 100 * each),
      line: {shape: "hv", color: COLOURS[place], width: 2.5}}))],
    layout: () => ({xaxis: {type: "log", title: {text: "magnitude"}, range: range(), exponentformat: "power"},
      yaxis: {type: "log", dtick: "D2", title: {text: "relative error (%)"}}, yaxis2: axis2, barmode: "overlay"}),
  });
  const lost = element("ul", {class: "lost", id: "explorer-lost", "aria-live": "polite"});
  line.frame.querySelector(".plot").after(lost);
  function redraw() {
    const found = counts();
    lost.replaceChildren(...chosen().map((format) => {
      const {total, under, over} = losses(format, found);
      const scale = format.block ? " (its elements; blocks have scales of their own)" : "";
      return element("li", {}, total ? `${format.name}${scale}: without a scale ${number(100 * under, 3)} % of the ${state.role} would become 0, ${number(100 * over, 3)} % would overflow.`
        : `${format.name}${scale}: from ${number(format.smallest)} to ${number(format.max)}.`);
    }));
    line.draw();
    error.draw();
  }
  drawn.push(redraw);
}
