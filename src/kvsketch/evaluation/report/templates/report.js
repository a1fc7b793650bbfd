"use strict";
(() => {
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];

  // Filters: what is off is hidden, in figures and in the table.
  const filters = document.getElementById("filters");
  const task = document.getElementById("task");
  const off = new Set();
  const rows = all("#all tbody tr");
  const show = () => {
    for (const x of all("[data-method]")) {
      const other = task.value && x.dataset.task && !under(x.dataset.task);
      x.classList.toggle("off", off.has(x.dataset.method) || Boolean(other));
    }
    const left = rows.filter((row) => !row.classList.contains("off")).length;
    document.getElementById("count").textContent = `${left} of ${rows.length} are shown.`;
  };
  const under = (name) => name === task.value || task.value.startsWith(`${name}/`);
  for (const button of all("button[data-toggle]")) {
    button.addEventListener("click", () => {
      const name = button.dataset.toggle;
      if (!off.delete(name)) off.add(name);
      button.setAttribute("aria-pressed", String(!off.has(name)));
      show();
    });
  }
  task.addEventListener("change", show);
  filters.hidden = false;
  show();

  // Sorting: numbers by value, text by the alphabet.
  const body = document.querySelector("#all tbody");
  const value = (row, column) => {
    const text = row.cells[column].textContent;
    if (text === "-") return -Infinity;
    const number = Number(text.replaceAll(",", ""));
    return text === "" || Number.isNaN(number) ? text : number;
  };
  const compare = (a, b) =>
    typeof a === "number" && typeof b === "number"
      ? a - b
      : String(a).localeCompare(String(b), "en", { numeric: true });
  const heads = all("#all thead th");
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const falling = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", falling ? "descending" : "ascending");
      const sign = falling ? -1 : 1;
      const sorted = [...rows].sort((a, b) => sign * compare(value(a, column), value(b, column)));
      body.append(...sorted);
    });
  });

  // Tips: the browser's own come late and not on touch, so the titles of points become ours.
  const tip = document.getElementById("tip");
  const said = new WeakMap();
  for (const svg of all("figure svg")) {
    const whole = svg.querySelector(":scope > title");
    svg.setAttribute("aria-label", whole.textContent);
    svg.removeAttribute("aria-labelledby");
    whole.remove();
    for (const title of all("title", svg)) {
      said.set(title.parentNode, title.textContent);
      title.remove();
    }
  }
  const place = (event) => {
    const point = event.target.closest && event.target.closest("use, path");
    const text = point && said.get(point);
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const { offsetWidth: w, offsetHeight: h } = tip;
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - w - 4))}px`;
    tip.style.top = `${event.clientY + 16 + h > innerHeight ? event.clientY - h - 8 : event.clientY + 16}px`;
  };
  document.addEventListener("pointerover", place);
  document.addEventListener("pointerdown", place);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") tip.hidden = true;
  });
})();
