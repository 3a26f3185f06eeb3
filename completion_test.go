package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// completer is a bash with our script, in a folder with some files. The function
// that the package bash-completion would bring is made up here: it splits words
// where blanks are.
const completer = `
_get_comp_words_by_ref() {
  cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} words=("${COMP_WORDS[@]}") cword=$COMP_CWORD
}
_filedir() { COMPREPLY=(); local ext=$1; for f in *; do [[ $f == "$cur"* && ( -z $ext || $f =~ \.($ext)$ ) ]] && COMPREPLY+=("$f"); done; }
compopt() { :; }
source <(warmroute completion bash)
COMP_LINE="$*" COMP_POINT=${#COMP_LINE} COMP_TYPE=9
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
__start_warmroute
printf '%s\n' "${COMPREPLY[@]}"
`

func TestBashCompletesCommandsFlagsAndValues(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"warm.yaml", "notes.txt", "trace.jsonl"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(os.Args[0], filepath.Join(dir, "warmroute")); err != nil {
		t.Fatal(err)
	}
	f := func(want string, words ...string) {
		t.Helper()
		cmd := exec.Command("bash", append([]string{"-c", completer, "bash", "warmroute"}, words...)...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), asProgram+"=1", "PATH="+dir+":"+os.Getenv("PATH"))
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %v: %s", words, err, out)
		}
		var offered []string
		for line := range strings.Lines(string(out)) {
			word, _, _ := strings.Cut(strings.TrimSpace(line), " ") // the rest describes it
			offered = append(offered, word)
		}
		slices.Sort(offered)
		if got := strings.Join(offered, " "); got != want {
			t.Errorf("%q: offered %q, want %q", words, got, want)
		}
	}
	f("serve", "se")
	f("bash fish zsh", "completion", "")
	f("bench", "help", "b")
	f("--listen --log-level", "serve", "--l")
	f("prefix", "serve", "--policy", "pref")
	f("least-load llmd-guide lmetric", "serve", "--policy", "l")
	f("prefix,least-load prefix,llmd-guide prefix,lmetric", "replay", "--policy", "prefix,l")
	f("agentic chats documents hot", "replay", "--workload", "")
	f("warm.yaml", "serve", "--config", "")
	f("trace.jsonl", "replay", "--trace", "t")
	f("debug error info warn", "check", "--log-level", "")
	f("", "serve", "")
}
