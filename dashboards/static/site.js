// What every page does: theme, ages, tabs, filters, copying of commands. No request is made; all of it is optional.
(function () {
  "use strict";
  var root = document.documentElement;

  function all(selector, within) { return Array.prototype.slice.call((within || document).querySelectorAll(selector)); }

  // --- theme: light, dark, or as the system says
  function shown() {
    var chosen = root.getAttribute("data-theme");
    if (chosen) { return chosen; }
    return window.matchMedia && window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  }
  function label(button) {
    var dark = shown() === "dark";
    button.setAttribute("aria-pressed", dark ? "true" : "false");
    button.setAttribute("title", dark ? "Switch to the light theme" : "Switch to the dark theme");
  }
  all("[data-theme-toggle]").forEach(function (button) {
    button.hidden = false;
    label(button);
    button.addEventListener("click", function () {
      var next = shown() === "dark" ? "light" : "dark";
      root.setAttribute("data-theme", next);
      try { window.localStorage.setItem("int8-theme", next); } catch (error) { /* lasts for this page only */ }
      label(button);
      document.dispatchEvent(new CustomEvent("int8-theme"));
    });
  });
  if (window.matchMedia) {
    var query = window.matchMedia("(prefers-color-scheme: dark)");
    if (query.addEventListener) {
      query.addEventListener("change", function () {
        all("[data-theme-toggle]").forEach(label);
        document.dispatchEvent(new CustomEvent("int8-theme"));
      });
    }
  }

  // --- ages: the page may be looked at long after it was built, above all when the runner is dead
  function age(seconds) {
    if (seconds < 90) { return "just now"; }
    var units = [[5400, 60, "minute"], [172800, 3600, "hour"], [Infinity, 86400, "day"]];
    for (var place = 0; place < units.length; place += 1) {
      if (seconds < units[place][0]) {
        var count = Math.round(seconds / units[place][1]);
        return count + " " + units[place][2] + (count === 1 ? "" : "s") + " ago";
      }
    }
    return "";
  }
  var now = Date.now() / 1000;
  all("time[data-age]").forEach(function (item) {
    var text = age(now - Number(item.getAttribute("data-age")));
    if (text) { item.textContent = text; }
  });
  all("[data-stale-since]").forEach(function (banner) {
    var old = now - Number(banner.getAttribute("data-stale-since")) > Number(banner.getAttribute("data-stale-after"));
    banner.hidden = !old;
  });

  // --- tabs: one panel at a time, arrow keys, remembered in the address
  all("[data-tabs]").forEach(function (group) {
    var tabs = all('[role="tab"]', group);
    var panels = tabs.map(function (tab) { return document.getElementById(tab.getAttribute("aria-controls")); });
    function select(index, focus) {
      tabs.forEach(function (tab, place) {
        var on = place === index;
        tab.setAttribute("aria-selected", on ? "true" : "false");
        tab.tabIndex = on ? 0 : -1;
        panels[place].hidden = !on;
      });
      if (focus) { tabs[index].focus(); }
    }
    function choose(index, focus) {
      select(index, focus);
      try { history.replaceState(null, "", "#" + panels[index].id); } catch (error) { /* not everywhere allowed */ }
    }
    function fromAddress() {
      var wanted = tabs.map(function (tab) { return "#" + tab.getAttribute("aria-controls"); }).indexOf(location.hash);
      select(wanted < 0 ? 0 : wanted, false);
    }
    tabs.forEach(function (tab, index) {
      tab.addEventListener("click", function () { choose(index, false); });
      tab.addEventListener("keydown", function (event) {
        var step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        var next = step ? (index + step + tabs.length) % tabs.length
          : event.key === "Home" ? 0 : event.key === "End" ? tabs.length - 1 : -1;
        if (next >= 0) { event.preventDefault(); choose(next, true); }
      });
    });
    group.hidden = false;
    all("[data-tab-heading]").forEach(function (heading) { heading.classList.add("visually-hidden"); });
    window.addEventListener("hashchange", fromAddress);
    fromAddress();
  });

  // --- filters: hide rows by their words, columns of the matrix by their engine
  all("[data-filter]").forEach(function (form) {
    var scope = document.getElementById(form.getAttribute("data-filter"));
    var field = form.querySelector('input[type="search"]');
    var selects = all("select", form);
    var boxes = all('input[type="checkbox"]', form);
    var status = form.querySelector("[data-filter-status]");
    function apply() {
      var words = field ? field.value.toLowerCase().split(/\s+/).filter(Boolean) : [];
      var rows = all("[data-words]", scope);
      var left = 0;
      rows.forEach(function (row) {
        var text = row.getAttribute("data-words").toLowerCase();
        var keep = words.every(function (word) { return text.indexOf(word) >= 0; });
        selects.forEach(function (select) {
          if (select.value && row.getAttribute("data-" + select.name) !== select.value) { keep = false; }
        });
        row.hidden = !keep;
        if (keep) { left += 1; }
      });
      boxes.forEach(function (box) {
        all("[data-engine]", scope).forEach(function (item) {
          if (item.getAttribute("data-engine") === box.value) { item.hidden = !box.checked; }
        });
      });
      if (status) { status.textContent = left === rows.length ? "" : left + " of " + rows.length + " rows shown"; }
    }
    form.hidden = false;
    form.addEventListener("submit", function (event) { event.preventDefault(); });
    form.addEventListener("input", apply);
    form.addEventListener("change", apply);
    apply();
  });

  // --- commands: copy by a click, where the browser lets us
  all("[data-copy]").forEach(function (button) {
    if (!navigator.clipboard) { return; }
    button.hidden = false;
    button.addEventListener("click", function () {
      navigator.clipboard.writeText(button.getAttribute("data-copy")).then(function () {
        var before = button.textContent;
        button.textContent = "Copied";
        setTimeout(function () { button.textContent = before; }, 1500);
      }, function () { /* not allowed here: the text can be selected */ });
    });
  });
})();
