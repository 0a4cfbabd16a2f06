// Compares the environments of two runs. Data came as classic scripts; text is only ever set as text.
(function () {
  "use strict";
  var data = window.INT8 || {};
  var runs = data.runs, fields = data.environments;
  var form = document.querySelector("[data-compare]");
  if (!runs || !fields || !form || !runs.id.length) { return; }
  var body = document.querySelector("[data-compare-rows]");
  var status = document.querySelector("[data-compare-status]");
  var before = form.querySelector('[name="before"]'), after = form.querySelector('[name="after"]');
  var everything = form.querySelector('[name="all"]');
  var last = runs.id.length - 1;

  [before, after].forEach(function (select) {
    for (var run = last; run >= 0; run -= 1) {
      var option = document.createElement("option");
      option.value = String(run);
      option.textContent = new Date(runs.t[run] * 1000).toISOString().slice(0, 16).replace("T", " ") + "  " + runs.id[run];
      select.appendChild(option);
    }
  });

  function cell(name, text) {
    var made = document.createElement(name);
    made.textContent = text;
    if (name === "th") { made.setAttribute("scope", "row"); }
    return made;
  }
  function value(field, run) { return field.runs[run] < 0 ? "none" : field.values[field.runs[run]]; }

  function show() {
    var one = Number(before.value), other = Number(after.value), differing = 0;
    body.textContent = "";
    Object.keys(fields).forEach(function (name) {
      var old = value(fields[name], one), now = value(fields[name], other);
      if (old !== now) { differing += 1; } else if (!everything.checked) { return; }
      var row = document.createElement("tr");
      if (old !== now) { row.className = "differs"; }
      row.appendChild(cell("th", name));
      row.appendChild(cell("td", old));
      row.appendChild(cell("td", now));
      body.appendChild(row);
    });
    status.textContent = (differing || "No") + " field" + (differing === 1 ? "" : "s") + " of " + Object.keys(fields).length + " differ" + (differing === 1 ? "s." : ".");
    try { window.history.replaceState(null, "", "?before=" + encodeURIComponent(runs.id[one]) + "&after=" + encodeURIComponent(runs.id[other])); } catch (error) { /* not from disk everywhere */ }
  }

  // ?before=ID&after=ID in the address names the runs; without it the newest and the one before it on the same host.
  function fromAddress() {
    var asked = new URLSearchParams(window.location.search);
    var one = runs.id.indexOf(asked.get("before")), other = runs.id.indexOf(asked.get("after"));
    if (other < 0) { other = last; }
    if (one < 0) {
      one = other;
      for (var run = other - 1; run >= 0; run -= 1) { if (runs.host[run] === runs.host[other]) { one = run; break; } }
    }
    before.value = String(one);
    after.value = String(other);
    show();
  }
  form.hidden = false;
  form.addEventListener("submit", function (event) { event.preventDefault(); });
  form.addEventListener("change", show);
  fromAddress();
})();
