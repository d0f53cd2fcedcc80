"use strict";
// The page says everything without this file. It adds the numbers of what the pointer or the
// keyboard is on, one tab stop and arrow keys for each chart, and opens the table a link leads to.
(() => {
  const tip = document.getElementById("tip");
  const marked = "[data-roving] a, [data-roving] [role=img]";
  let current = null;

  // A unit's numbers are those of its row in the table; other marks carry theirs as their label.
  function fill(mark) {
    tip.replaceChildren();
    const row = mark.hash ? document.getElementById(mark.hash.slice(1)) : null;
    if (!row) {
      tip.textContent = mark.getAttribute("aria-label");
      return;
    }
    const head = row.closest("table").tHead.rows[0].cells;
    const table = tip.appendChild(document.createElement("table"));
    [...row.cells].forEach((cell, i) => {
      const line = table.insertRow();
      line.insertCell().textContent = head[i].textContent;
      line.insertCell().textContent = cell.textContent;
    });
  }

  function place(mark) {
    const box = mark.getBoundingClientRect();
    const width = document.documentElement.clientWidth;
    const left = Math.max(8, Math.min(box.left, width - tip.offsetWidth - 8));
    const below = box.bottom + 6;
    const fits = below + tip.offsetHeight < window.innerHeight || box.top < tip.offsetHeight + 6;
    const top = fits ? below : box.top - tip.offsetHeight - 6;
    tip.style.transform = `translate(${left + window.scrollX}px, ${top + window.scrollY}px)`;
  }

  function show(mark) {
    hide();
    current = mark;
    fill(mark);
    tip.hidden = false;
    if (mark.hash) mark.setAttribute("aria-describedby", "tip");
    place(mark);
  }

  function hide() {
    if (current) current.removeAttribute("aria-describedby");
    current = null;
    tip.hidden = true;
    tip.style.transform = "";
  }

  const markOf = (event) => event.target.closest && event.target.closest(marked);

  function above(mark, step) {
    const cell = mark.closest("td");
    let row = cell && cell.parentNode;
    while (row && (row = step < 0 ? row.previousElementSibling : row.nextElementSibling)) {
      const found = row.cells[cell.cellIndex].querySelector("a");
      if (found) return found;
    }
    return null;
  }

  function move(event) {
    const mark = markOf(event);
    if (event.key === "Escape") hide();
    if (!mark || event.ctrlKey || event.altKey || event.metaKey) return;
    const all = [...mark.closest("[data-roving]").querySelectorAll(marked)];
    const at = all.indexOf(mark);
    const next = {
      ArrowRight: () => all[at + 1], ArrowLeft: () => all[at - 1],
      ArrowDown: () => above(mark, 1), ArrowUp: () => above(mark, -1),
      Home: () => all[0], End: () => all[all.length - 1],
    }[event.key];
    if (!next) return;
    event.preventDefault();
    const target = next();
    if (!target) return;
    mark.tabIndex = -1;
    target.tabIndex = 0;
    target.focus();
  }

  function reveal() {
    const target = location.hash && document.getElementById(location.hash.slice(1));
    if (!target) return;
    for (let box = target.closest("details"); box; box = box.parentElement.closest("details")) {
      box.open = true;
    }
    target.scrollIntoView({ block: "center" });
  }

  for (const group of document.querySelectorAll("[data-roving]")) {
    group.querySelectorAll(marked).forEach((mark, i) => { mark.tabIndex = i ? -1 : 0; });
  }
  document.addEventListener("pointerover", (event) => {
    const mark = markOf(event);
    if (mark) show(mark);
  });
  document.addEventListener("pointerout", (event) => { if (markOf(event)) hide(); });
  document.addEventListener("focusin", (event) => {
    const mark = markOf(event);
    if (mark) show(mark);
  });
  document.addEventListener("focusout", (event) => { if (markOf(event)) hide(); });
  document.addEventListener("keydown", move);
  window.addEventListener("hashchange", reveal);
  reveal();
})();
