// Charts of a series page. Data came as classic scripts (INT8.runs, INT8.series); Plotly is beside this file.
(function () {
  "use strict";
  var data = window.INT8 || {};
  var runs = data.runs;
  var series = data.series;
  var target = document.getElementById("charts");
  if (!runs || !series || !target || !window.Plotly) { return; }
  var Plotly = window.Plotly;
  var columns = series.columns;
  var days = series.runs.map(function (run) { return new Date(runs.t[run] * 1000).toISOString(); });
  var plots = [];
  var syncing = false;
  var turns = 0;

  // Colours of the style sheet, as the theme has them now: rgb(...), because a custom property alone is not resolved.
  var probe = document.createElement("span");
  probe.hidden = true;
  document.body.appendChild(probe);
  function variable(name) { probe.style.color = "var(" + name + ")"; return getComputedStyle(probe).color; }
  // Text of records goes into Plotly's labels, which know a few tags: escape what could open one.
  function inert(text) {
    return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  }
  function number(value, digits) {
    if (value === null || value === undefined) { return "–"; }
    return Number(value).toLocaleString("en", { maximumSignificantDigits: digits || 4 });
  }
  function scaled(name, factor) {
    var column = columns[name];
    return column ? column.map(function (value) { return value === null ? null : value * factor; }) : null;
  }
  function translucent(colour, share) { return colour.replace("rgb(", "rgba(").replace(")", ", " + share + ")"); }
  // A finger that moves over a chart scrolls the page; the range buttons zoom there.
  var coarse = Boolean(window.matchMedia && window.matchMedia("(pointer: coarse)").matches);
  var sans = getComputedStyle(document.body).fontFamily;

  var CHARTS = [
    { title: "Throughput", note: "sequences a second; higher is better", value: "throughput", low: "throughput_low", high: "throughput_high", factor: 1, unit: " seq/s" },
    { title: "Latency of a batch", note: "milliseconds; median with its interval, p90 and p99 dotted; lower is better", value: "p50_s", low: "p50_low_s", high: "p50_high_s", more: ["p90_s", "p99_s"], factor: 1e3, unit: " ms" },
    { title: "Speed-up over FP32", note: "in the same run; higher is better", value: "speedup", low: "speedup_low", high: "speedup_high", factor: 1, unit: "×" },
    { title: "Accuracy change against FP32", note: "percentage points, with its 95 % interval; the line is FP32", value: "delta", low: "delta_low", high: "delta_high", factor: 100, unit: " pp", zero: true },
    { title: "Flips", note: "share of predictions that differ from FP32's, percent; lower is better", value: "flips", factor: 100, unit: " %", short: true }
  ];

  function indices(host) {
    var found = [];
    series.runs.forEach(function (run, place) { if (runs.host[run] === host) { found.push(place); } });
    return found;
  }
  var hosts = runs.hosts.map(function (host, place) { return place; }).filter(function (place) { return indices(place).length > 0; });

  // Places where a version changed on the same host: what changed, in words.
  function bumps() {
    var found = [];
    hosts.forEach(function (host) {
      var before = null;
      indices(host).forEach(function (place) {
        var set = runs.versions[series.runs[place]];
        if (before !== null && set !== before) {
          var one = runs.version_sets[before], other = runs.version_sets[set], words = [];
          Object.keys(Object.assign({}, one, other)).sort().forEach(function (name) {
            if (one[name] !== other[name]) { words.push(name + " " + (other[name] || "gone")); }
          });
          found.push({ x: days[place], text: words.slice(0, 3).join(", ") });
        }
        before = set;
      });
    });
    return found;
  }
  var changes = bumps();

  // Steps, accepted runs and known changes: a sign and a colour each; the table below the charts has the words.
  var MARKS = { slower: ["▼", "--fail-ink"], faster: ["▲", "--pass-ink"], accepted: ["✓", "--soft"], known: ["✎", "--soft"] };
  var happened = (series.marks || []).filter(function (mark) { return MARKS[mark.kind] && mark.at < days.length; })
    .map(function (mark) { return { x: days[mark.at], kind: mark.kind, text: mark.text }; });

  function hover(place, chart) {
    var run = series.runs[place];
    var value = columns[chart.value][place] * chart.factor;
    var lines = ["<b>" + number(value) + chart.unit + "</b>"];
    if (chart.low && columns[chart.low] && columns[chart.low][place] !== null) {
      lines[0] += "  (" + number(columns[chart.low][place] * chart.factor) + " to " + number(columns[chart.high][place] * chart.factor) + ")";
    }
    lines.push(new Date(runs.t[run] * 1000).toISOString().slice(0, 16).replace("T", " ") + " UTC");
    lines.push("run " + inert(runs.id[run]));
    lines.push("commit " + inert((runs.commit[run] || "unknown").slice(0, 10)));
    var set = runs.version_sets[runs.versions[run]];
    lines.push(inert(["torch", "torchao"].filter(function (name) { return set[name]; }).map(function (name) { return name + " " + set[name]; }).join(", ")));
    return lines.join("<br>");
  }

  function traces(chart) {
    var made = [];
    var values = scaled(chart.value, chart.factor);
    var palette = ["--c2", "--c5", "--c3", "--c4", "--c1", "--c6", "--c7", "--c0"];
    hosts.forEach(function (host, order) {
      var colour = variable(palette[order % palette.length]);
      var places = indices(host);
      var x = places.map(function (place) { return days[place]; });
      function pick(column) { return places.map(function (place) { return column[place]; }); }
      var low = chart.low && scaled(chart.low, chart.factor), high = chart.high && scaled(chart.high, chart.factor);
      if (low && high) {
        // A band needs unbroken ends: each run of points with an interval is a closed piece.
        var bandX = [], bandY = [], piece = [];
        var close = function () {
          if (piece.length) {
            piece.forEach(function (place) { bandX.push(days[place]); bandY.push(high[place]); });
            piece.slice().reverse().forEach(function (place) { bandX.push(days[place]); bandY.push(low[place]); });
            bandX.push(null); bandY.push(null);
          }
          piece = [];
        };
        places.forEach(function (place) { if (low[place] === null) { close(); } else { piece.push(place); } });
        close();
        made.push({ x: bandX, y: bandY, type: "scatter", mode: "lines", fill: "toself", fillcolor: translucent(colour, 0.2), line: { width: places.length < 3 ? 1.5 : 0, color: colour }, hoverinfo: "skip", showlegend: false, connectgaps: false });
      }
      (chart.more || []).forEach(function (name) {
        var column = scaled(name, chart.factor);
        if (column) {
          made.push({ x: x, y: pick(column), type: "scatter", mode: "lines", name: name.slice(0, 3), line: { width: 1, dash: "dot", color: colour }, hoverinfo: "skip", showlegend: false });
        }
      });
      made.push({
        x: x, y: pick(values), type: "scatter", mode: places.length > 150 ? "lines" : "lines+markers", name: inert(runs.hosts[host].title + " (" + runs.hosts[host].fingerprint + ")"),
        line: { width: 1.8, color: colour }, marker: { size: 5, color: colour }, showlegend: hosts.length > 1, connectgaps: false,
        text: places.map(function (place) { return values[place] === null ? "" : hover(place, chart); }), hovertemplate: "%{text}<extra></extra>",
        customdata: places.map(function (place) { return runs.file[series.runs[place]]; })
      });
    });
    return made;
  }

  // Runs without a number: a mark at the foot, with the reason.
  function gaps(chart, colour) {
    var words = { f: "failed", s: "skipped", i: "invalid", o: "not measured" };
    var x = [], text = [], files = [];
    series.runs.forEach(function (run, place) {
      if (columns[chart.value][place] !== null) { return; }
      var withheld = series.status[place] === "o" && series.verdict[place] === "x";
      x.push(days[place]);
      text.push("<b>" + (withheld ? "withheld: accuracy or evidence fails" : words[series.status[place]]) + "</b><br>" + inert(series.reasons[place] || "").replace(/(.{60}[^ ]*) /g, "$1<br>") + "<br>run " + inert(runs.id[run]));
      files.push(runs.file[run]);
    });
    return { x: x, y: x.map(function () { return 0.02; }), yaxis: "y2", type: "scatter", mode: "markers", marker: { symbol: "x-thin", size: 8, line: { width: 2, color: colour } }, text: text, hovertemplate: "%{text}<extra></extra>", customdata: files, showlegend: false };
  }

  function layout(chart) {
    var soft = variable("--soft"), line = variable("--line"), ink = variable("--ink");
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 56, r: 12, t: 26, b: 34 },
      font: { family: sans, size: 12, color: soft }, hovermode: "closest", dragmode: coarse ? false : "zoom", showlegend: hosts.length > 1,
      legend: { orientation: "h", y: -0.16, x: 0, font: { size: 11 } },
      hoverlabel: { bgcolor: variable("--paper"), bordercolor: variable("--strong"), font: { color: ink, size: 12, family: sans }, align: "left" },
      xaxis: { fixedrange: coarse, type: "date", gridcolor: line, linecolor: line, zeroline: false, tickfont: { color: soft } },
      yaxis: { fixedrange: coarse, gridcolor: line, zeroline: Boolean(chart.zero), zerolinecolor: variable("--strong"), zerolinewidth: 1.5, tickfont: { color: soft }, automargin: true, nticks: 6 },
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
      shapes: happened.map(function (mark) {
        return { type: "line", x0: mark.x, x1: mark.x, y0: 0, y1: 1, yref: "paper", line: { width: 1.5, color: variable(MARKS[mark.kind][1]) } };
      }).concat(changes.map(function (bump) { return { type: "line", x0: bump.x, x1: bump.x, y0: 0, y1: 1, yref: "paper", line: { width: 1, dash: "dash", color: variable("--strong") } }; })),
      annotations: happened.slice(-8).map(function (mark) {
        return { x: mark.x, y: 0, yref: "paper", yanchor: "bottom", xanchor: "left", text: MARKS[mark.kind][0] + " " + inert(mark.text), showarrow: false, font: { size: 10, color: variable(MARKS[mark.kind][1]) }, xshift: 2, bgcolor: variable("--paper"), opacity: 0.9 };
      }).concat(changes.slice(-12).map(function (bump, place) { return { x: bump.x, y: 1, yref: "paper", yanchor: "bottom", xanchor: "left", text: inert(bump.text), showarrow: false, font: { size: 10, color: soft }, textangle: 0, xshift: -2, yshift: (place % 2) * 11 }; }))
    };
  }

  // The range that a chart is zoomed to; null where it shows everything, or is not there yet.
  function zoomed(plot) {
    var axis = plot.node.layout && plot.node.layout.xaxis;
    return axis && axis.autorange === false ? axis.range.slice() : null;
  }

  function zoom(others, update) {
    syncing = true;
    var there = others.filter(function (plot) { return plot.node.layout; });
    Promise.all(there.map(function (plot) { return Plotly.relayout(plot.node, Object.assign({}, update)); }))
      .then(function () { syncing = false; });
  }

  function draw() {
    var before = zoomed(plots[0]);
    var turn = turns += 1;
    plots.forEach(function (plot) { Plotly.purge(plot.node); });
    // One chart a task: the first stands while the others are drawn, and the page stays alive.
    (function next(place) {
      if (turn !== turns || place === plots.length) { return; }
      drawOne(plots[place], place ? zoomed(plots[0]) : before);
      setTimeout(function () { next(place + 1); }, 0);
    })(0);
  }

  function drawOne(plot, range) {
    var shape = layout(plot.chart);
    if (range) { shape.xaxis.range = range; shape.xaxis.autorange = false; }
    var drawn = traces(plot.chart).concat([gaps(plot.chart, variable("--fail-line"))]);
    Plotly.newPlot(plot.node, drawn, shape, { responsive: true, displayModeBar: false, showTips: false, doubleClick: "reset+autosize" });
    plot.node.on("plotly_click", function (event) {
      var file = event.points[0] && event.points[0].customdata;
      if (typeof file === "string") { location.href = "../" + file; }
    });
    plot.node.on("plotly_relayout", function (change) {
      if (syncing) { return; }
      var others = plots.filter(function (other) { return other !== plot; });
      if (change["xaxis.autorange"]) {
        zoom(others, { "xaxis.autorange": true });
      } else if (change["xaxis.range[0]"]) {
        zoom(others, { "xaxis.range": [change["xaxis.range[0]"], change["xaxis.range[1]"]] });
      }
    });
  }

  CHARTS.forEach(function (chart) {
    if (!columns[chart.value]) { return; }
    var figure = document.createElement("figure");
    var caption = document.createElement("figcaption");
    var title = document.createElement("h2");
    var note = document.createElement("span");
    var node = document.createElement("div");
    title.textContent = chart.title;
    note.className = "lead";
    note.textContent = chart.note;
    node.className = chart.short ? "plot short" : "plot";
    caption.appendChild(title);
    caption.appendChild(note);
    figure.appendChild(caption);
    figure.appendChild(node);
    node.setAttribute("role", "img");
    node.setAttribute("aria-label", chart.title + " over " + series.runs.length + " runs; the table below has the newest values");
    target.appendChild(figure);
    plots.push({ chart: chart, node: node });
  });
  if (!plots.length) {
    var empty = document.createElement("p");
    empty.className = "empty";
    empty.textContent = "No run of this cell has a number that may be shown; the table has the reasons.";
    target.appendChild(empty);
    return;
  }
  draw();
  document.addEventListener("int8-theme", draw);

  Array.prototype.forEach.call(document.querySelectorAll("[data-chart-tools]"), function (tools) {
    tools.hidden = false;
    Array.prototype.forEach.call(tools.querySelectorAll("[data-days]"), function (button) {
      button.addEventListener("click", function () {
        var span = Number(button.getAttribute("data-days"));
        var last = runs.t[series.runs[series.runs.length - 1]] * 1000;
        var update = span ? { "xaxis.range": [new Date(last - span * 864e5).toISOString(), new Date(last + 864e5 * span / 60).toISOString()] } : { "xaxis.autorange": true };
        Array.prototype.forEach.call(tools.querySelectorAll("[data-days]"), function (other) { other.setAttribute("aria-pressed", other === button ? "true" : "false"); });
        zoom(plots, update);
      });
    });
  });
})();
