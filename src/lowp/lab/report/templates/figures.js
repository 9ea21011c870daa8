"use strict";
// The frame of every figure: caption, controls, plot, downloads, command. Text is set as text, never as HTML.

const report = JSON.parse(document.getElementById("report-data").textContent);
const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C", "#B8A500"];
const SYMBOLS = {baseline: "diamond", better: "triangle-up", worse: "triangle-down", "within noise": "circle",
  "more seeds needed": "circle-open"};
const drawn = [];  // functions that draw a plot again, in the theme of the moment

function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

function theme() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  return {paper: of("--paper"), ink: of("--ink"), soft: of("--soft"), line: of("--line"), panel: of("--panel"),
    verdicts: {baseline: of("--accent"), better: of("--good"), worse: of("--bad"), "within noise": of("--soft"),
      "more seeds needed": of("--open")}};
}

function number(value, digits = 4) {
  if (value === null || value === undefined) return "-";
  if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-4)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

function bytes(value) {
  if (value === null || value === undefined) return "-";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  while (value >= 999.5 && place < units.length - 1) { value /= 1000; place += 1; }
  return `${Number(value.toPrecision(3))} ${units[place]}`;
}

function save(name, text, type) {
  const link = element("a", {href: URL.createObjectURL(new Blob([text], {type})), download: name});
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// A cell that a spreadsheet would take for a formula gets an apostrophe.
function csvCell(value) {
  if (value === null || value === undefined) return "";
  let text = String(value);
  if (typeof value === "string" && /^[=+\-@\t\r]/.test(text)) text = "'" + text;
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function csv(rows) {
  const columns = [...new Set(rows.flatMap((row) => Object.keys(row)))];
  return [columns, ...rows.map((row) => columns.map((name) => row[name]))].map((row) => row.map(csvCell).join(",")).join("\n") + "\n";
}

// Which of many lines are drawn: a box to tick for each, in the line's colour.
function ticks(label, names, shown, colourFor, change) {
  const boxes = names.map((name) => {
    const box = element("input", {type: "checkbox", ...(shown.has(name) ? {checked: ""} : {}),
      onchange: (event) => { event.target.checked ? shown.add(name) : shown.delete(name); change(); }});
    const sample = element("span", {class: "sample", "aria-hidden": "true"});
    sample.style.background = colourFor(name);
    return element("label", {class: "tick"}, box, sample, name);
  });
  return element("details", {class: "ticks"}, element("summary", {}, label), element("div", {}, ...boxes));
}

function choice(label, options, change, chosen = options[0]) {
  const list = element("select", {onchange: (event) => change(event.target.value)});
  for (const option of options) list.append(element("option", {value: option, ...(option === chosen ? {selected: ""} : {})}, option));
  return element("label", {}, label, list);
}

// One figure. `rows()` are its numbers, for the CSV; `traces(colours)` and `layout(colours)` are Plotly's.
function figure(parent, {id, title, sentence, rows, traces, layout, controls = [], height = 420, command = report.command}) {
  const plot = traces ? element("div", {class: "plot", role: "img", "aria-label": `${title}. ${sentence}`}) : null;
  const buttons = [element("button", {type: "button", "data-csv": id, onclick: () => save(`${id}.csv`, csv(rows()), "text/csv")}, "CSV")];
  if (plot) {
    const png = () => Plotly.downloadImage(plot, {format: "png", filename: id, width: 1200, height: Math.max(600, height), scale: 2});
    buttons.unshift(element("button", {type: "button", "data-png": id, onclick: png}, "PNG"));
  }
  const frame = element("figure", {id},
    element("figcaption", {}, element("h3", {}, title), element("p", {class: "note"}, sentence)),
    ...(controls.length ? [element("div", {class: "controls"}, ...controls)] : []),
    ...(plot ? [plot] : []));
  frame.append(element("div", {class: "foot"}, ...buttons, element("code", {}, command)));
  parent.append(frame);
  const draw = () => {
    if (!plot) return;
    const colours = theme();
    const own = layout ? layout(colours) : {};
    const axis = {gridcolor: colours.line, linecolor: colours.line, zerolinecolor: colours.line, automargin: true};
    const full = {height: own.height ?? height, margin: {l: 56, r: 12, t: 12, b: 48}, paper_bgcolor: colours.paper,
      plot_bgcolor: colours.paper, font: {color: colours.ink, family: "system-ui, DejaVu Sans, sans-serif", size: 13},
      legend: {orientation: "h", x: 0, y: 1.01, yanchor: "bottom", font: {size: 11}}, hovermode: "closest", ...own,
      xaxis: {...axis, ...own.xaxis}, yaxis: {...axis, ...own.yaxis}};
    if (own.yaxis2) full.yaxis2 = {...axis, ...own.yaxis2};
    Plotly.react(plot, traces(colours), full, {responsive: true, displaylogo: false, displayModeBar: false});
  };
  drawn.push(draw);
  return {frame, draw};
}

// A table that can be sorted by every column, by mouse and keyboard, and filtered by text.
function table(parent, {id, title, sentence, columns, rows, rowClass = () => ""}) {
  const {frame} = figure(parent, {id, title, sentence, rows: () => rows.map((row) => row.record ?? row)});
  let by = null, up = true, wanted = "";
  const body = element("tbody");
  const value = (row, column) => column.value(row);
  const heads = columns.map((column) => {
    const head = element("th", {scope: "col", class: column.number ? "number" : "", "aria-sort": "none"});
    head.append(element("button", {type: "button", onclick: () => {
      up = by === column ? !up : true;
      by = column;
      heads.forEach((each, place) => each.setAttribute("aria-sort", columns[place] === by ? (up ? "ascending" : "descending") : "none"));
      fill();
    }}, column.name));
    return head;
  });
  const count = element("span", {class: "note", "aria-live": "polite"});
  const filter = element("input", {type: "search", "aria-label": `Filter ${title}`, placeholder: "filter",
    oninput: (event) => { wanted = event.target.value.toLowerCase(); fill(); }});
  const text = (row, column) => column.text ? column.text(row) : (value(row, column) ?? "-");
  function order(a, b) {
    const one = value(a, by), other = value(b, by);
    if (one === null || one === undefined) return 1;
    if (other === null || other === undefined) return -1;
    const sign = typeof one === "number" ? one - other : String(one).localeCompare(String(other));
    return up ? sign : -sign;
  }
  function fill() {
    let shown = rows.filter((row) => columns.map((column) => String(text(row, column))).join(" ").toLowerCase().includes(wanted));
    if (by) shown = [...shown].sort(order);
    body.replaceChildren(...shown.map((row) => element("tr", {class: rowClass(row)}, ...columns.map((column) =>
      element("td", {class: [column.number ? "number" : "", column.class ? column.class(row) : ""].join(" ").trim()}, String(text(row, column)))))));
    count.textContent = `${shown.length} of ${rows.length}`;
  }
  fill();
  const controls = element("div", {class: "controls"}, element("label", {}, "Filter rows", filter), count);
  const scroll = element("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": title},
    element("table", {}, element("thead", {}, element("tr", {}, ...heads)), body));
  frame.querySelector("figcaption").after(controls, scroll);
}
