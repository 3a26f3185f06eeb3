package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// operationsSection is the text of docs/operations.md under a heading of the second level.
func operationsSection(t *testing.T, heading string) string {
	t.Helper()
	source, err := os.ReadFile("docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, found := strings.Cut(string(source), "\n## "+heading+"\n")
	if !found {
		t.Fatalf("docs/operations.md has no section %q", heading)
	}
	text, _, _ = strings.Cut(text, "\n## ")
	return text
}

// documentedSettings are the rows of the guide's table: default and reload, by path.
func documentedSettings(t *testing.T) map[string][2]string {
	t.Helper()
	rows := map[string][2]string{}
	for line := range strings.Lines(operationsSection(t, "Settings")) {
		cells := strings.Split(line, " | ")
		if len(cells) != 5 || !strings.HasPrefix(line, "| `") {
			continue
		}
		path := strings.Trim(cells[0], "| `")
		if _, twice := rows[path]; twice {
			t.Errorf("%s has two rows", path)
		}
		rows[path] = [2]string{strings.Trim(cells[1], "`"), cells[3]}
	}
	return rows
}

// writtenDefaults are config.yaml's values as they are written there, by path.
func writtenDefaults(t *testing.T, node *yaml.Node, prefix string) map[string]string {
	t.Helper()
	found := map[string]string{}
	for i := 0; i < len(node.Content); i += 2 {
		path, value := prefix+node.Content[i].Value, node.Content[i+1]
		switch {
		case value.Kind == yaml.MappingNode:
			for p, v := range writtenDefaults(t, value, path+".") {
				found[p] = v
			}
		case value.Kind == yaml.SequenceNode:
			found[path] = "[]"
		case value.Value == "":
			found[path] = `""`
		default:
			found[path] = value.Value
		}
	}
	return found
}

// waitingSettings says of each setting whether it waits for the next start.
func waitingSettings(of reflect.Type, prefix string, all bool, waits map[string]bool) {
	for i := range of.NumField() {
		field := of.Field(i)
		if !field.IsExported() {
			continue
		}
		path, no := prefix+field.Tag.Get("mapstructure"), all || field.Tag.Get("reload") == "no"
		if field.Type.Kind() == reflect.Struct {
			waitingSettings(field.Type, path+".", no, waits)
		} else {
			waits[path] = no
		}
	}
}

func TestTheGuideHasEverySettingWithItsDefault(t *testing.T) {
	var document yaml.Node
	if err := yaml.Unmarshal(defaultsYAML, &document); err != nil {
		t.Fatal(err)
	}
	want := writtenDefaults(t, document.Content[0], "")
	waits := map[string]bool{}
	waitingSettings(reflect.TypeFor[Config](), "", false, waits)
	rows := documentedSettings(t)
	for path, value := range want {
		row, known := rows[path]
		if !known {
			t.Errorf("docs/operations.md, Settings, lacks | `%s` | `%s` | unit | %s | when to change it |", path, value, yesOrNo(!waits[path]))
			continue
		}
		if row[0] != value {
			t.Errorf("%s is %s by default, and the guide says %s", path, value, row[0])
		}
		if says, _, _ := strings.Cut(row[1], ";"); says != yesOrNo(!waits[path]) {
			t.Errorf("%s: a reload takes it: %s; the guide says %s", path, yesOrNo(!waits[path]), row[1])
		}
	}
	for path := range rows {
		if _, known := want[path]; !known {
			t.Errorf("the guide has %s, which is no setting", path)
		}
	}
}

func yesOrNo(yes bool) string {
	if yes {
		return "yes"
	}
	return "no"
}

// productFiles are the parsed sources of the proxy: no tests, no scripts, nothing simulated.
func productFiles(t *testing.T, roots ...string) map[string]*ast.File {
	t.Helper()
	files := map[string]*ast.File{}
	for _, root := range roots {
		err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case entry.IsDir() && path != "." && (root == "." || entry.Name() == "vllmsim"):
				return fs.SkipDir
			case entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go"):
				return nil
			}
			files[path], err = parser.ParseFile(token.NewFileSet(), path, nil, 0)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return files
}

func literalText(e ast.Expr) string {
	if literal, ok := e.(*ast.BasicLit); ok && literal.Kind == token.STRING {
		value, _ := strconv.Unquote(literal.Value)
		return value
	}
	return ""
}

// errorCodes are the values that an apiError's code is given in the proxy's sources.
func errorCodes(t *testing.T) (codes []string) {
	t.Helper()
	add := func(name string, value ast.Expr) {
		if code := literalText(value); name == "code" && code != "" && !slices.Contains(codes, code) {
			codes = append(codes, code)
		}
	}
	for _, file := range productFiles(t, "proxy") {
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.KeyValueExpr:
				if key, ok := n.Key.(*ast.Ident); ok {
					add(key.Name, n.Value)
				}
			case *ast.AssignStmt:
				for i, left := range n.Lhs {
					if field, ok := left.(*ast.SelectorExpr); ok && len(n.Rhs) == len(n.Lhs) {
						add(field.Sel.Name, n.Rhs[i])
					}
				}
			}
			return true
		})
	}
	return codes
}

func TestTheGuideHasEveryErrorOfTheProxys(t *testing.T) {
	guide := operationsSection(t, "Errors and their cures")
	codes := errorCodes(t)
	if len(codes) < 15 {
		t.Fatalf("only %q were found in the sources", codes)
	}
	for _, code := range codes {
		if !regexp.MustCompile(`(?m)^\| [45]\d\d \| .` + code + `. \|`).MatchString(guide) {
			t.Errorf("docs/operations.md, Errors and their cures, has no row of the code %s", code)
		}
	}
	for _, row := range regexp.MustCompile("(?m)^\\| \\d+ \\| `(\\w+)`").FindAllStringSubmatch(guide, -1) {
		if !slices.Contains(codes, row[1]) {
			t.Errorf("the guide has the code %s, which nothing is answered with", row[1])
		}
	}
}

// loggedWarnings are the messages that the sources log as warnings or errors.
func loggedWarnings(t *testing.T) map[string]string {
	t.Helper()
	found := map[string]string{} // where, by message
	for path, file := range productFiles(t, ".", "proxy", "router", "backends", "metrics") {
		ast.Inspect(file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			how, ok := call.Fun.(*ast.SelectorExpr)
			if !ok || !slices.Contains([]string{"Warn", "Error", "log", "Log"}, how.Sel.Name) {
				return true
			}
			for i, arg := range call.Args {
				// What has its level from a variable may be a warning.
				level := fmt.Sprint(selected(call.Args[:i]))
				if message := literalText(arg); message != "" && !strings.Contains(level, "LevelInfo") && !strings.Contains(level, "LevelDebug") {
					found[message] = path
					break
				} else if message != "" {
					break
				}
			}
			return true
		})
	}
	return found
}

// selected are the names of the selectors among the expressions, as slog.LevelInfo is one.
func selected(all []ast.Expr) (names []string) {
	for _, e := range all {
		if s, ok := e.(*ast.SelectorExpr); ok {
			names = append(names, s.Sel.Name)
		}
	}
	return names
}

func TestTheGuideHasEveryWarningOfTheLog(t *testing.T) {
	guide := operationsSection(t, "Errors and their cures")
	found := loggedWarnings(t)
	if len(found) < 15 {
		t.Fatalf("only %v were found in the sources", found)
	}
	for message, path := range found {
		if !strings.Contains(guide, "| `"+message+"`") {
			t.Errorf("docs/operations.md, Errors and their cures, has no row of %q (%s)", message, path)
		}
	}
	for _, row := range regexp.MustCompile("(?m)^\\| `([^`]+)`").FindAllStringSubmatch(guide, -1) {
		if found[row[1]] == "" {
			t.Errorf("the guide has %q, which is never logged as a warning", row[1])
		}
	}
}

func TestTheGuideNamesMetricsThatThereAre(t *testing.T) {
	names := map[string]bool{"": true}
	for _, file := range productFiles(t, "metrics") {
		ast.Inspect(file, func(n ast.Node) bool {
			if e, ok := n.(ast.Expr); ok {
				names[literalText(e)] = true
			}
			return true
		})
	}
	source, err := os.ReadFile("docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`\bwarmroute_([a-z_]+)`).FindAllStringSubmatch(string(source), -1)
	if len(found) < 30 {
		t.Fatalf("only %q were found", found)
	}
	for _, f := range found {
		family := regexp.MustCompile(`_(bucket|sum|count)$`).ReplaceAllString(f[1], "")
		if !names[family] && !names["warmroute_"+family] {
			t.Errorf("the guide names %s, which is no metric", f[0])
		}
	}
}
