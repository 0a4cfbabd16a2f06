// Before the first paint: the theme that was chosen here earlier, else the system's. Classic script: works from disk.
(function () {
  "use strict";
  var chosen = null;
  try { chosen = window.localStorage.getItem("int8-theme"); } catch (error) { /* storage may be forbidden */ }
  if (chosen === "light" || chosen === "dark") { document.documentElement.setAttribute("data-theme", chosen); }
  document.documentElement.classList.add("js");
})();
