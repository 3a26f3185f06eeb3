package main

import (
	"bytes"
	"go/scanner"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

func readText(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestPathsInDocuments has CONTRIBUTING.md, and the table of docs/architecture.md that
// says where to look, name only files and folders that exist.
func TestPathsInDocuments(t *testing.T) {
	_, section, _ := strings.Cut(readText(t, "docs/architecture.md"), "\n## To change X, look in Y\n")
	section, _, _ = strings.Cut(section, "\n## ")
	path := regexp.MustCompile("`([a-zA-Z0-9_.-]+(?:/[a-zA-Z0-9_.-]*)+)`")
	for name, text := range map[string]string{"docs/architecture.md": section, "CONTRIBUTING.md": readText(t, "CONTRIBUTING.md")} {
		found := path.FindAllStringSubmatch(text, -1)
		if len(found) == 0 {
			t.Errorf("%s names no path", name)
		}
		for _, match := range found {
			if strings.Contains(match[1], "NAME") { // of a file to be written
				continue
			}
			if _, err := os.Stat(match[1]); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

// TestLinksInDocuments has each link to a file or a heading of this repository lead to one.
func TestLinksInDocuments(t *testing.T) {
	var pages []string
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/*/*.md", "lab/docs/*.md"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		pages = append(pages, found...)
	}
	link := regexp.MustCompile(`\]\(([^)\s]+)\)`)
	for _, page := range pages {
		for _, found := range link.FindAllStringSubmatch(readText(t, page), -1) {
			if strings.Contains(found[1], "://") {
				continue
			}
			file, heading, _ := strings.Cut(found[1], "#")
			target := filepath.Join(filepath.Dir(page), file)
			if file == "" {
				target = page
			}
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s: %v", page, err)
			} else if heading != "" && !slices.Contains(headingsOf(readText(t, target)), heading) {
				t.Errorf("%s: %s has no heading %s", page, target, heading)
			}
		}
	}
}

// headingsOf returns the names by which GitHub links to the headings of a page.
func headingsOf(page string) (names []string) {
	notInName := regexp.MustCompile("[^a-z0-9_ -]")
	for _, heading := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(page, -1) {
		names = append(names, strings.ReplaceAll(notInName.ReplaceAllString(strings.ToLower(heading[1]), ""), " ", "-"))
	}
	return names
}

// TestLintersHaveTagsOfCI has editors and golangci-lint read the files that .ci/run reads.
func TestLintersHaveTagsOfCI(t *testing.T) {
	inCI := regexp.MustCompile(`(?m)^tags=(.*)$`).FindStringSubmatch(readText(t, ".ci/run"))
	inLinters := regexp.MustCompile(`(?m)^ *build-tags: \[(.*)\]$`).FindStringSubmatch(readText(t, ".golangci.yml"))
	if inCI == nil || inLinters == nil || inCI[1] != strings.ReplaceAll(inLinters[1], ", ", ",") {
		t.Errorf(".ci/run has %q, .golangci.yml %q", inCI, inLinters)
	}
}

// TestWorkflowRunsEachStage has GitHub run every stage of .ci/run, at night at least.
func TestWorkflowRunsEachStage(t *testing.T) {
	ci := readText(t, ".ci/run")
	stages := strings.Fields(regexp.MustCompile(`(?m)^\[ \$# -gt 0 \] \|\| stages=\((.*)\)$`).FindStringSubmatch(ci)[1])
	var run []string
	for _, list := range regexp.MustCompile(`(?m)^ *stages: \[(.*)\]$`).FindAllStringSubmatch(readText(t, ".github/workflows/checks.yml"),
		-1) {
		run = append(run, strings.Fields(strings.ReplaceAll(list[1], ",", " "))...)
	}
	stages = append(stages, "nightly")
	slices.Sort(stages)
	slices.Sort(run)
	if !slices.Equal(run, stages) {
		t.Errorf("GitHub runs %v, .ci/run has %v", run, stages)
	}
}

// TestGoVersionInDocuments has the documents name the version of Go that go.mod requires.
func TestGoVersionInDocuments(t *testing.T) {
	required := regexp.MustCompile(`(?m)^go (\d+\.\d+)(.*)$`).FindStringSubmatch(readText(t, "go.mod"))
	if required == nil || required[2] != ".0" {
		t.Fatalf("go.mod requires Go %q: the documents promise that any patch release suffices", required)
	}
	for _, path := range []string{"README.md", "CONTRIBUTING.md"} {
		found := regexp.MustCompile(`Go (\d+\.\d+)`).FindAllStringSubmatch(readText(t, path), -1)
		if len(found) == 0 {
			t.Errorf("%s names no version of Go", path)
		}
		for _, match := range found {
			if match[1] != required[1] {
				t.Errorf("%s names Go %s, go.mod %s", path, match[1], required[1])
			}
		}
	}
}

// maxLineLength is how many characters a line of Go has at most. A tab counts as one.
const maxLineLength = 140

// TestLineLength checks the length of all lines of Go, but for those in strings of several lines, which are data of another language.
func TestLineLength(t *testing.T) {
	files := 0
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (strings.HasPrefix(d.Name(), ".") && path != "." || d.Name() == "node_modules"):
			return filepath.SkipDir
		case filepath.Ext(path) != ".go":
			return nil
		}
		files++
		source, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for number, line := range codeLines(source) {
			if n := utf8.RuneCount(line); n > maxLineLength {
				t.Errorf("%s:%d: %d characters, the limit is %d", path, number, n, maxLineLength)
			}
		}
		return nil
	})
	if err != nil || files < 100 {
		t.Errorf("%d files, %v", files, err)
	}
}

// codeLines returns the lines of a file by number, without those that are in a string of several lines.
func codeLines(source []byte) map[int][]byte {
	lines := map[int][]byte{}
	for i, line := range bytes.Split(source, []byte("\n")) {
		lines[i+1] = line
	}
	files := token.NewFileSet()
	file := files.AddFile("", -1, len(source))
	var s scanner.Scanner
	s.Init(file, source, nil, 0)
	for {
		pos, kind, text := s.Scan()
		if kind == token.EOF {
			return lines
		}
		if kind != token.STRING || !strings.Contains(text, "\n") {
			continue
		}
		first := file.Line(pos)
		for n := range strings.Count(text, "\n") + 1 {
			delete(lines, first+n)
		}
	}
}
