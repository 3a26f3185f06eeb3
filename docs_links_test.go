package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// anchors are the headings of a document as links name them: in small letters, with
// hyphens for spaces, without punctuation.
func anchors(source string) (all []string) {
	for _, heading := range regexp.MustCompile(`(?m)^#+ (.+)$`).FindAllStringSubmatch(source, -1) {
		name := regexp.MustCompile(`[^\pL\pN _-]`).ReplaceAllString(strings.ToLower(heading[1]), "")
		all = append(all, strings.ReplaceAll(name, " ", "-"))
	}
	return all
}

func TestLinksOfTheDocumentsLeadSomewhere(t *testing.T) {
	documents, err := filepath.Glob("docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, document := range append(documents, "README.md", "CHANGELOG.md") {
		source, err := os.ReadFile(document)
		if err != nil {
			t.Fatal(err)
		}
		for _, link := range regexp.MustCompile(`\]\(([^)\s]+)\)`).FindAllStringSubmatch(string(source), -1) {
			if strings.Contains(link[1], "://") {
				continue
			}
			file, anchor, _ := strings.Cut(link[1], "#")
			target, named := filepath.Join(filepath.Dir(document), file), source
			if file == "" {
				target = document
			} else if info, err := os.Stat(target); err != nil {
				t.Errorf("%s: %s leads nowhere", document, link[1])
				continue
			} else if !info.IsDir() {
				named, _ = os.ReadFile(target)
			}
			if anchor != "" && !slices.Contains(anchors(string(named)), anchor) {
				t.Errorf("%s: %s has no heading #%s", document, target, anchor)
			}
		}
	}
}
