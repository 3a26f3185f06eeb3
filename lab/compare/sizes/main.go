// Sizes prints how many lines serve requests, by package, and how much of package router
// works on a *Router:
//
//	go run ./lab/compare/sizes [COMMIT...]
//
// prints a column for each commit, by default one for HEAD. Lines are those of wc -l in files
// that are not tests, of what server imports and of cli without the lab's commands.
package main

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"
)

// In older commits the lab's packages stood at the root and its commands in cli.
var (
	labPackages = regexp.MustCompile(`^(lab|loadgen|replay|sim)(/|$)`)
	labCommands = regexp.MustCompile(`^(bench|demo|replay|sim|progress)(_\w+)?\.go$`)
)

// size is what is counted in one commit.
type size struct {
	lines                  map[string]int // by package
	routerFiles            int            // of router itself
	methods, takingARouter int
}

func main() {
	commits := os.Args[1:]
	if len(commits) == 0 {
		commits = []string{"HEAD"}
	}
	if err := printSizes(commits); err != nil {
		fmt.Fprintln(os.Stderr, "sizes:", err)
		os.Exit(1)
	}
}

func printSizes(commits []string) error {
	var sizes []*size
	packages := map[string]bool{}
	for _, c := range commits {
		s, err := measureCommit(c)
		if err != nil {
			return fmt.Errorf("%s: %w", c, err)
		}
		sizes = append(sizes, s)
		for p := range s.lines {
			packages[p] = true
		}
	}
	t := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(t, "lines\t%s\t\n", strings.Join(commits, "\t"))
	row := func(name string, value func(*size) int) {
		fmt.Fprintf(t, "%s\t", name)
		for _, s := range sizes {
			fmt.Fprintf(t, "%d\t", value(s))
		}
		fmt.Fprintln(t)
	}
	for _, p := range slices.Sorted(maps.Keys(packages)) {
		row(p, func(s *size) int { return s.lines[p] })
	}
	row("all that serve requests", func(s *size) int {
		total := 0
		for _, n := range s.lines {
			total += n
		}
		return total
	})
	row("files of router", func(s *size) int { return s.routerFiles })
	row("methods of Router", func(s *size) int { return s.methods })
	row("other functions that take a *Router", func(s *size) int { return s.takingARouter })
	row("both", func(s *size) int { return s.methods + s.takingARouter })
	return t.Flush()
}

// measureCommit checks a commit out into a temporary folder and counts there.
func measureCommit(commit string) (*size, error) {
	root, err := os.MkdirTemp("", "sizes-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(root)
	archive, err := output("", "git", "archive", "--format=tar", commit)
	if err != nil {
		return nil, err
	}
	tar := exec.Command("tar", "-x", "-C", root)
	tar.Stdin = bytes.NewReader(archive)
	if out, err := tar.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("tar: %w: %s", err, out)
	}
	// Packages of the standard library have no module.
	list, err := output(root, "go", "list", "-deps", "-f", "{{with .Module}}{{if .Main}}{{$.Dir}}{{end}}{{end}}", "./server", "./cli")
	if err != nil {
		return nil, err
	}
	s := &size{lines: map[string]int{}}
	for dir := range strings.FieldsSeq(string(list)) {
		name, err := filepath.Rel(root, dir)
		if err != nil {
			return nil, err
		}
		if labPackages.MatchString(name) {
			continue // cli imported it for the lab's commands
		}
		files, err := sourceFiles(dir)
		if err != nil {
			return nil, err
		}
		for _, file := range files {
			if name == "cli" && labCommands.MatchString(filepath.Base(file)) {
				continue
			}
			source, err := os.ReadFile(file)
			if err != nil {
				return nil, err
			}
			s.lines[name] += bytes.Count(source, []byte("\n"))
		}
	}
	return s, s.countRouter(filepath.Join(root, "router"))
}

func output(dir, name string, args ...string) ([]byte, error) {
	cmd := exec.Command(name, args...)
	cmd.Dir, cmd.Stderr = dir, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", name, args[0], err)
	}
	return out, nil
}

// sourceFiles returns the Go files in a folder, whatever their build tags, without tests.
func sourceFiles(dir string) ([]string, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	return slices.DeleteFunc(files, func(name string) bool { return strings.HasSuffix(name, "_test.go") }), err
}

// countRouter counts the files and functions of package router.
func (s *size) countRouter(dir string) error {
	files, err := sourceFiles(dir)
	if err != nil {
		return err
	}
	s.routerFiles = len(files)
	for _, name := range files {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for _, d := range file.Decls {
			f, ok := d.(*ast.FuncDecl)
			switch {
			case !ok:
			case hasRouter(f.Recv):
				s.methods++
			case hasRouter(f.Type.Params):
				s.takingARouter++
			}
		}
	}
	return nil
}

// hasRouter reports whether one of the fields has the type Router or *Router.
func hasRouter(fields *ast.FieldList) bool {
	return fields != nil && slices.ContainsFunc(fields.List, func(f *ast.Field) bool {
		t := f.Type
		if p, ok := t.(*ast.StarExpr); ok {
			t = p.X
		}
		name, ok := t.(*ast.Ident)
		return ok && name.Name == "Router"
	})
}
