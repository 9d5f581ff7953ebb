/* Render what Sphinx marks as mathematics by the copy of KaTeX beside this file. */
document.addEventListener("DOMContentLoaded", () => {
  for (const element of document.querySelectorAll(".math")) {
    const displayed = element.tagName === "DIV";
    const source = element.textContent.trim().replace(/^\\[[(]|\\[\])]$/g, "");
    katex.render(source, element, { displayMode: displayed, throwOnError: false });
  }
});
