package main

import (
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// allowedImports lists, for each top-level directory, the other directories whose
// packages its packages may import. "main" is the root.
var allowedImports = map[string]string{
	"atomicfile":   "",
	"clock":        "",
	"filelock":     "clock",
	"httpapi":      "",
	"recovery":     "clock",
	"usage":        "atomicfile filelock",
	"backends":     "clock recovery",
	"prompt":       "",
	"router":       "atomicfile backends prompt",
	"kvevents":     "clock recovery backends prompt router",
	"metrics":      "recovery usage backends prompt router",
	"proxy":        "filelock httpapi recovery usage backends prompt router metrics",
	"cluster":      "clock recovery backends prompt router metrics proxy",
	"config":       "usage backends prompt router kvevents metrics proxy cluster",
	"fleet":        "atomicfile clock filelock recovery backends router metrics cluster config",
	"registration": "httpapi backends metrics proxy config fleet",
	"admin":        "httpapi usage backends prompt router metrics proxy cluster config fleet",
	"server": "atomicfile clock filelock recovery usage backends prompt router kvevents metrics proxy cluster config fleet " +
		"registration admin",
	"cli":  "usage backends prompt router metrics proxy cluster config fleet registration admin server",
	"main": "cli config server lab",

	"lab":     "clock filelock backends prompt router kvevents metrics proxy cluster config fleet registration admin server cli",
	"e2e":     "filelock usage backends prompt router metrics proxy cluster config fleet registration admin server cli lab",
	"scripts": "lab",
}

// testImports lists what tests may import besides: simulated replicas, load and traces.
const testImports = "lab"

// leaves lists modules that take long to compile, and the only package outside lab that imports each. It imports no package of
// ours, so that it is compiled beside others.
var leaves = map[string]string{
	"github.com/redis/go-redis/v9/": "cluster/redis",
}

// mayImport reports whether a package may import another one. Both are paths of
// directories relative to the root, the root itself "".
func mayImport(from, to string, test bool) bool {
	fromPart, _, _ := strings.Cut(from, "/")
	if fromPart == "" {
		fromPart = "main"
	}
	toPart, _, _ := strings.Cut(to, "/")
	allowed, known := allowedImports[fromPart]
	switch {
	case !known:
		return false
	case fromPart == "scripts" && toPart == "scripts": // programs
		return from == to
	case fromPart == toPart:
		return true
	}
	return slices.Contains(strings.Fields(allowed), toPart) || test && slices.Contains(strings.Fields(testImports), toPart)
}

func TestMayImport(t *testing.T) {
	for _, c := range []struct {
		from, to   string
		test, want bool
	}{
		{"proxy", "prompt", false, true},
		{"router/policy", "prompt", false, true},
		{"router", "proxy", false, false},
		{"router", "proxy", true, false},
		{"proxy", "lab/sim", false, false},
		{"proxy", "lab/sim", true, true},
		{"cli", "lab/replay", false, false},
		{"", "cli", false, true},
		{"", "router", false, false},
		{"lab/chaos", "lab/testbed", false, true},
		{"scripts/release", "scripts/sdk/go", false, false},
		{"proxy", "", false, false},
		{"util", "backends", false, false},
		{"proxy", "util", false, false},
	} {
		if got := mayImport(c.from, c.to, c.test); got != c.want {
			t.Errorf("%q imports %q, in a test %v: got %v, want %v", c.from, c.to, c.test, got, c.want)
		}
	}
}

func TestImportDirection(t *testing.T) {
	const module = "warmroute"
	files := 0
	err := filepath.WalkDir(".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name := entry.Name(); entry.IsDir() && path != "." && (strings.HasPrefix(name, ".") || name == "testdata" || name == "node_modules") {
			return filepath.SkipDir
		}
		if entry.IsDir() || filepath.Ext(path) != ".go" {
			return nil
		}
		files++
		source, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		from := strings.TrimPrefix(filepath.ToSlash(filepath.Dir(path)), ".")
		for _, spec := range source.Imports {
			imported, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				return err
			}
			to, inModule := strings.CutPrefix(imported+"/", module+"/")
			for prefix, leaf := range leaves {
				isTest := strings.HasSuffix(path, "_test.go")
				if strings.HasPrefix(imported+"/", prefix) && from != leaf && !strings.HasPrefix(from, "lab/") {
					t.Errorf("%s imports %s, which only %s may", path, imported, leaf)
				}
				if inModule && from == leaf && !isTest {
					t.Errorf("%s imports %s; a leaf imports no package of ours", path, imported)
				}
			}
			if inModule && !mayImport(from, strings.TrimSuffix(to, "/"), strings.HasSuffix(path, "_test.go")) {
				t.Errorf("%s imports %s, against the direction of imports", path, imported)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if files == 0 {
		t.Fatal("no Go file found; is the test run in the root of the module?")
	}
}

// TestImportsInDocuments compares the table of docs/architecture.md with allowedImports.
func TestImportsInDocuments(t *testing.T) {
	page, err := os.ReadFile("docs/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(page), "| Package | May import |\n|---|---|\n")
	table, _, _ = strings.Cut(table, "\n\n")
	documented := map[string]string{}
	for row := range strings.SplitSeq(table, "\n") {
		cells := strings.Split(row, "|")
		if len(cells) != 4 {
			t.Fatalf("a row of the table is %q", row)
		}
		name, others := strings.Trim(cells[1], " `"), strings.NewReplacer("`", "", ",", "").Replace(strings.TrimSpace(cells[2]))
		if others == "none" {
			others = ""
		}
		documented[name] = others
	}
	if !maps.Equal(documented, allowedImports) {
		t.Errorf("docs/architecture.md has %v\nwant %v", documented, allowedImports)
	}
}
