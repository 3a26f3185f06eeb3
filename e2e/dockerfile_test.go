package e2e

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// dockerfileStages reads the Dockerfile into stages of instructions, the
// lines that a backslash continues joined.
func dockerfileStages(t *testing.T) [][]string {
	t.Helper()
	source, err := os.ReadFile("Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	var stages [][]string
	for line := range strings.Lines(strings.ReplaceAll(string(source), "\\\n", " ")) {
		if line = strings.Join(strings.Fields(line), " "); line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if strings.HasPrefix(line, "FROM ") {
			stages = append(stages, nil)
		}
		last := len(stages) - 1
		stages[last] = append(stages[last], line)
	}
	if len(stages) != 2 {
		t.Fatalf("%d stages, want one that builds and one that runs", len(stages))
	}
	return stages
}

// instruction returns what follows the keyword in the only line that has it.
func instruction(t *testing.T, stage []string, keyword string) string {
	t.Helper()
	var found []string
	for _, line := range stage {
		if rest, ok := strings.CutPrefix(line, keyword+" "); ok {
			found = append(found, rest)
		}
	}
	if len(found) != 1 {
		t.Fatalf("%d lines with %s, want 1", len(found), keyword)
	}
	return found[0]
}

// execForm reads the JSON list that ends an instruction: an image without a
// shell cannot run anything else.
func execForm(t *testing.T, text string) []string {
	t.Helper()
	var argv []string
	if err := json.Unmarshal([]byte(text[max(0, strings.Index(text, "[")):]), &argv); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return argv
}

func TestDockerfile(t *testing.T) {
	final := dockerfileStages(t)[1]
	if final[0] != "FROM scratch" {
		t.Errorf("it begins with %q", final[0])
	}
	if user := instruction(t, final, "USER"); !regexp.MustCompile(`^[1-9]\d*:[1-9]\d*$`).MatchString(user) {
		t.Errorf("it runs as %q, want the numbers of a user and a group that are not root", user)
	}
	binary := execForm(t, instruction(t, final, "ENTRYPOINT"))[0]
	if !slices.Contains(final, "COPY --from=build "+binary+" "+binary) {
		t.Errorf("nothing puts %s in its place", binary)
	}
	health := execForm(t, instruction(t, final, "HEALTHCHECK"))
	if health[0] != binary {
		t.Errorf("the health check runs %q, and there is nothing but %s", health, binary)
	}
	if status, _, output := runCommand(t, append(health[1:], "--help")...); status != 0 {
		t.Errorf("the health check is no command: %s", output)
	}
}

func TestDockerfileGoVersion(t *testing.T) {
	from := dockerfileStages(t)[0][0]
	module, err := os.ReadFile("go.mod")
	if err != nil {
		t.Fatal(err)
	}
	want := regexp.MustCompile(`(?m)^go (\d+\.\d+)`).FindSubmatch(module)[1]
	if !strings.HasPrefix(from, "FROM golang:"+string(want)) {
		t.Errorf("it builds %q, go.mod asks for %s", from, want)
	}
}

func TestDockerContextFiles(t *testing.T) {
	lines := func(file string) []string {
		source, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var found []string
		for line := range strings.Lines(string(source)) {
			if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
				found = append(found, line)
			}
		}
		return found
	}
	ignored := lines(".gitignore")
	for _, line := range lines(".dockerignore") {
		if !slices.Contains(ignored, line) {
			t.Errorf("%s is left out of the build, and git may track it: the binary would call itself dirty", line)
		}
	}
}
