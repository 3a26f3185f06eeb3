package main

import (
	"fmt"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// importFault says what is wrong with package from importing package to, both
// named by their folder from the root, the root itself "". Each part may use
// itself and what stands to its left in
//
//	filelock ← backends ← router ← metrics ← proxy ← admin ← config ← server ← cli ← main
//
// sim uses nothing but itself. replay may use backends, router and sim, and
// loadgen replay; only cli and main use those two. The programs under scripts are
// mains of their own, and share scripts/fleet.
func importFault(from, to string) string {
	line := map[string]int{"filelock": 0, "backends": 1, "router": 2, "metrics": 3, "proxy": 4, "admin": 5, "config": 6, "server": 7, "cli": 8, "": 9, "scripts": 9}
	fromPart, _, _ := strings.Cut(from, "/")
	toPart, _, _ := strings.Cut(to, "/")
	fromPlace, fromKnown := line[fromPart]
	toPlace, toKnown := line[toPart]
	switch {
	case fromPart == "scripts" && to == "scripts/fleet":
		return ""
	case toPart == "" || toPart == "scripts":
		return "nothing imports a program"
	case fromPart == "sim" || fromPart == "replay" || fromPart == "loadgen":
		allowed := map[string][]string{"sim": {"sim"}, "replay": {"replay", "router", "backends", "sim"}, "loadgen": {"loadgen", "replay", "sim"}}
		if slices.Contains(allowed[fromPart], toPart) {
			return ""
		}
		return fmt.Sprintf("%s may use only %v", fromPart, allowed[fromPart])
	case toPart == "sim" && fromKnown:
		return ""
	case (toPart == "replay" || toPart == "loadgen") && fromKnown && fromPlace >= line["cli"]:
		return ""
	case toPart == "replay" || toPart == "loadgen":
		return "only a program may use " + toPart
	case !fromKnown:
		return from + " has no place in the line; give it one"
	case !toKnown:
		return to + " has no place in the line; give it one"
	case toPlace > fromPlace:
		return "the arrow runs back"
	}
	return ""
}

func TestImportFaultKnowsWhichWayArrowsRun(t *testing.T) {
	f := func(from, to string, allowed bool) {
		t.Helper()
		if fault := importFault(from, to); (fault == "") != allowed {
			t.Errorf("%q imports %q: got %q, want allowed %v", from, to, fault, allowed)
		}
	}
	for _, arrow := range [][2]string{
		{"", "proxy"}, {"", "metrics"}, {"", "router/policy"}, {"", "sim"}, {"", "replay"}, {"cli", "loadgen"}, {"", "cli"}, {"cli", "config"},
		{"proxy", "metrics"}, {"proxy", "router/prompt"}, {"proxy", "backends/transport"}, {"proxy", "proxy/ui"}, {"admin", "proxy"}, {"proxy/recorder", "filelock"},
		{"metrics", "router"}, {"metrics", "backends"},
		{"router", "backends"}, {"router", "router/index"}, {"router/index", "router/prompt"},
		{"backends", "backends/transport"}, {"sim", "sim/engine"}, {"proxy", "sim"},
		{"replay", "router"}, {"replay", "sim/engine"}, {"loadgen", "replay"}, {"scripts/load", "loadgen"}, {"scripts/load", "proxy"},
		{"scripts/chaos", "scripts/fleet"}, {"scripts/fleet", "sim"},
	} {
		f(arrow[0], arrow[1], true)
	}
	for _, arrow := range [][2]string{
		{"backends", "router"}, {"sim", "backends"}, {"replay", "loadgen"}, {"backends", "metrics"}, {"backends", "proxy"},
		{"router", "metrics"}, {"router/policy", "proxy"}, {"metrics", "proxy"}, {"proxy", "admin"}, {"filelock", "backends"},
		{"replay", "proxy"}, {"replay", "metrics"}, {"proxy", "replay"}, {"router", "replay"}, {"sim", "replay"}, {"proxy", "loadgen"}, {"loadgen", "router"},
		{"proxy", ""}, {"scripts/load", ""}, {"replay", ""}, {"", "scripts/load"}, {"scripts/chaos", "scripts/load"}, {"", "scripts/fleet"},
		{"", "util"}, {"util", "backends"},
	} {
		f(arrow[0], arrow[1], false)
	}
}

func TestImportsFormALine(t *testing.T) {
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
			to, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				return fmt.Errorf("%s: %w", path, err)
			}
			if to != module && !strings.HasPrefix(to, module+"/") {
				continue
			}
			if fault := importFault(from, strings.TrimPrefix(strings.TrimPrefix(to, module), "/")); fault != "" {
				t.Errorf("%s imports %s: %s", path, to, fault)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if files == 0 {
		t.Fatal("no Go file found; is the test run in the module's root?")
	}
}
