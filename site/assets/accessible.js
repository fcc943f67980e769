// What the theme leaves out for readers who use a keyboard or a screen reader.
addEventListener("DOMContentLoaded", () => {
  for (const caption of document.querySelectorAll(".caption[role=heading]")) caption.setAttribute("aria-level", "2");
  for (const block of document.querySelectorAll("pre, .table-wrapper")) block.tabIndex = 0; // they scroll
  for (const corner of document.querySelectorAll("th")) {
    if (corner.textContent.trim()) continue;
    corner.replaceWith(Object.assign(document.createElement("td"), { className: corner.className })); // it heads nothing
  }
  document.querySelector(".sidebar-drawer")?.setAttribute("aria-label", "all pages");
  document.querySelector(".toc-drawer")?.setAttribute("aria-label", "this page");
});
