// Prefer titles with more of the searched words, and whole pages of the guide.
const searched = (new URLSearchParams(location.search).get("q") || "")
  .toLowerCase()
  .split(/\W+/)
  .filter((word) => word.length > 2);

// Where a word is best answered, if the page contains it.
const answers = {
  callback: "trainers",
  conv2d: "choosing",
  covered: "reference_torch",
  cuda: "hardware",
  example: "quickstart_torch",
  mseloss: "guide_torch",
  norm: "reference_torch",
  resnet: "choosing",
  skip: "reference_torch",
  train: "quickstart_torch",
};

var Scorer = {
  score: ([page, title, anchor, , score, , kind]) => {
    if (kind === "object") return score;
    const words = title.toLowerCase();
    const named = searched.filter((word) => words.includes(word)).length;
    const guide = !page.includes("/") && !anchor;
    const answer = searched.some((word) => answers[word] === page && !anchor);
    const old = page === "changelog" ? 10 : 0;
    return score + 5 * named + (guide ? 1 : 0) + (answer ? 20 : 0) - old;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: {0: 15, 1: 5, 2: -5},
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
