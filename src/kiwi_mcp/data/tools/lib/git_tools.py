"""The tools for the git repository of a project: `main` is the one that KIWI_TOOL_ID names.

git reads no settings of the repository, of its owner or of the machine, so no program that they name is started: no
hook, filter, external diff or monitor. What only looks works on a temporary git folder that has the refs, the index
and the objects of the real one. A commit is made in the copy of the git folder that Kiwi puts in the sandbox.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp

SECONDS = 60
MOST_CHANGES, MOST_TEXT = 1_000, 100_000
CAREFUL = (
    "core.hooksPath=/dev/null", "core.fsmonitor=false", "core.attributesFile=/dev/null", "core.excludesFile=/dev/null",
    "submodule.recurse=false", "log.showSignature=false", "gc.auto=0", "core.quotePath=false",
)  # fmt: skip
LEFT_OUT = re.compile(r"(^|/)\.env(\.|/|$)|(^|/)\.ai/(outputs|state|logs|threads)/")
"""Secrets, which a sandbox hides, and what Kiwi writes while tools run."""
KEYS = re.compile(r"(^|/)(\.netrc|\.npmrc|\.pypirc|\.git-credentials|id_[^/.]+|[^/]*\.(pem|key|p12|pfx|jks|keystore))$")
"""Files that hold secrets as a rule: they are committed only where they are in the repository already."""
WORDS = {"A": "added", "M": "changed", "D": "deleted", "T": "changed", "U": "in conflict", "?": "untracked"}


def main(**given):
    project = Path(os.environ["KIWI_PROJECT"])
    return ACTIONS[os.environ["KIWI_TOOL_ID"]](project, **given)


def init(project):
    for folder in (project, *project.parents):
        if os.path.lexists(folder / ".git"):
            sys.exit(f"already_exists: {folder} is a git repository")
    (project / ".git").mkdir()  # fails if another program makes one, or a link, in this moment
    ask({}, "init", "-q", "--template=", "--initial-branch=main", str(project))
    return {"path": str(project), "branch": "main"}


def status(project):
    git = view(project)
    changes = [{"path": path, **states} for path, states in changed(project, git)]
    left = {"omitted_changes": len(changes) - MOST_CHANGES} if len(changes) > MOST_CHANGES else {}
    return {**head(git), "changes": changes[:MOST_CHANGES], **left}


def diff(project, path=".", staged=False, commit=""):
    git = view(project)
    words = [*(["--cached"] if staged else []), *([resolved(git, commit)] if commit else [])]
    plain = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--no-renames", "--ignore-submodules=all", *words)
    names = ask(git, *plain, "--name-only", "-z", "--", f":(literal){path}").split("\0")
    hidden = [f":(exclude,literal){name}" for name in names if name and not is_visible(project, name)]
    text = ask(git, *plain, "--", f":(literal){path}", *hidden)
    left = {"omitted_characters": len(text) - MOST_TEXT} if len(text) > MOST_TEXT else {}
    return {"path": path, "diff": text[:MOST_TEXT], **left}


def log(project, path=".", limit=20):
    git = view(project)
    if not head(git)["commit"]:
        return {"path": path, "commits": []}
    listed = ask(git, "log", "-z", f"-n{limit}", "--format=%h%x1f%aI%x1f%an%x1f%s", "--", f":(literal){path}")
    rows = [row.split("\x1f", 3) for row in listed.split("\0") if row]
    return {"path": path, "commits": [{"commit": id, "at": at, "by": by, "message": said} for id, at, by, said in rows]}


def commit(project, message, paths=(".",)):
    if not os.access(folder_of(project) / "config", os.W_OK):
        sys.exit("unavailable: this repository cannot be changed from here: a merge or a rebase is under way, or it is a sparse checkout or another user's")
    git, before = {"GIT_DIR": str(project / ".git")}, head(view(project))
    wanted = [path.rstrip("/") for path in paths]
    found = [one for one in changed(project, git) if any(w == "." or f"{one[0]}/".startswith(f"{w}/") for w in wanted)]
    if stuck := [path for path, states in found if "in conflict" in states.values()]:
        sys.exit(f"conflict: {stuck[0]!r} is in conflict; the owner resolves it first")
    left = [path for path, states in found if states == {"unstaged": "untracked"} and KEYS.search(path)]
    files = [path for path, _ in found if path not in left and not path.endswith("/")]  # not other repositories
    if not files:
        sys.exit("nothing_to_commit: nothing changed there; git_status shows what did")
    parent = ["-p", before["commit"]] if before["commit"] else []
    # What the owner staged besides stays staged, and is not in this commit.
    apart = {**git, "GIT_INDEX_FILE": f"{mkdtemp()}/index"}
    ask(apart, "read-tree", *([before["commit"]] if parent else ["--empty"]))
    for index in (apart, git):
        ask(index, "update-index", "-z", "--add", "--remove", "--stdin", stdin="".join(f"{one}\0" for one in files))
    tree = ask(apart, "write-tree").strip()
    made = ask(git, "commit-tree", "--no-gpg-sign", *parent, "-F", "-", tree, stdin=message).strip()
    ask(git, "update-ref", "-m", f"commit: {message.partition(chr(10))[0]}", "HEAD", made, *parent[1:])
    return {"commit": made, "branch": before["branch"], "files": files, **({"left_out": left} if left else {})}


def view(project):
    """Return the variables of a temporary git folder with the refs, index and objects of the project's own."""
    real, made = folder_of(project), Path(mkdtemp())
    for one in real.iterdir():
        is_plain = one.is_file() and not one.is_symlink()
        if is_plain and (one.name in {"HEAD", "packed-refs", "index", "shallow"} or one.name.startswith("sharedindex.")):
            shutil.copyfile(one, made / one.name)
    shutil.copytree(real / "refs", made / "refs", ignore=lambda at, names: [n for n in names if Path(at, n).is_symlink()])
    for name in ("objects", "info"):
        (made / name).mkdir()
    if (real / "info").is_dir() and (ignored := real / "info" / "exclude").is_file():
        shutil.copyfile(ignored, made / "info" / "exclude")
    asked = ["config", "--file", str(real / "config"), "--default", "sha1", "--get", "extensions.objectformat"]
    is_long = ask({}, *asked).strip() == "sha256"
    extensions = "[extensions]\n\tobjectformat = sha256\n" if is_long else ""
    (made / "config").write_text(f"[core]\n\trepositoryformatversion = {int(is_long)}\n{extensions}")
    return {"GIT_DIR": str(made), "GIT_OBJECT_DIRECTORY": str(real / "objects")}


def folder_of(project):
    real = project / ".git"
    if real.is_symlink() or not (real / "objects").is_dir() or not (real / "refs").is_dir():
        sys.exit(f"not_found: {project} is not the top of a git repository of its own; git_init makes one")
    return real


def head(git):
    branch = ask(git, "symbolic-ref", "--short", "-q", "HEAD", ends=(0, 1)).strip()
    return {"branch": branch or None, "commit": ask(git, "rev-parse", "-q", "--verify", "HEAD", ends=(0, 1)).strip() or None}


def resolved(git, commit):
    found = ask(git, "rev-parse", "-q", "--verify", "--end-of-options", f"{commit}^{{commit}}", ends=(0, 1)).strip()
    return found or sys.exit(f"not_found: there is no commit {commit!r}")


def changed(project, git):
    """Return the changed files with how they changed, without those that this sandbox does not show."""
    words = ("status", "--porcelain", "-z", "--untracked-files=all", "--ignore-submodules=all", "--no-renames")
    rows = [row for row in ask(git, *words).split("\0") if row]
    found = [(row[3:], {"staged": WORDS.get(row[0].strip("?")), "unstaged": WORDS.get(row[1])}) for row in rows]
    return [(path, {k: v for k, v in states.items() if v}) for path, states in found if is_visible(project, path)]


def is_visible(project, path):
    """Whether a file is not hidden from this tool: something empty is mounted over those that are."""
    if LEFT_OUT.search(path):
        return False
    place = project / path
    while place != project and not os.path.lexists(place):
        place = place.parent
    return os.lstat(place).st_dev == os.lstat(project).st_dev


def ask(git, *words, stdin="", ends=(0,)):
    env = {
        "PATH": os.environ["PATH"], "HOME": "/nonexistent", "LC_ALL": "C.UTF-8",
        "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_TERMINAL_PROMPT": "0",
        "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_REPLACE_OBJECTS": "1", "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none",
        **git, **({"GIT_WORK_TREE": os.environ["KIWI_PROJECT"]} if git else {}),
    }  # fmt: skip
    careful = [word for one in CAREFUL for word in ("-c", one)]
    done = subprocess.run(
        ["git", "--no-pager", *careful, *words],
        input=stdin.encode(), capture_output=True, timeout=SECONDS, cwd=os.environ["KIWI_PROJECT"], env=env,
    )  # fmt: skip
    if done.returncode not in ends:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        sys.exit(f"execution_failed: git {words[0]}: {said[-1] if said else 'failed'}")
    return done.stdout.decode(errors="replace")


ACTIONS = {"git_init": init, "git_status": status, "git_diff": diff, "git_log": log, "git_commit": commit}
