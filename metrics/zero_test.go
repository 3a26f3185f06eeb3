package metrics

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"strconv"
	"strings"
	"testing"

	"warmroute/backends"
)

// constants are the values of the package's own string types, by type, as its source
// declares them.
func constants(t *testing.T) map[string][]string {
	t.Helper()
	entries, err := os.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	values := map[string][]string{}
	for _, entry := range entries {
		if name := entry.Name(); !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), entry.Name(), nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			spec, ok := n.(*ast.ValueSpec)
			if !ok || len(spec.Values) != 1 {
				return true
			}
			of, named := spec.Type.(*ast.Ident)
			text, literal := spec.Values[0].(*ast.BasicLit)
			if named && literal && text.Kind == token.STRING {
				value, _ := strconv.Unquote(text.Value)
				values[of.Name] = append(values[of.Name], value)
			}
			return true
		})
	}
	return values
}

// What rates are taken of must be there before the first event, or the first is lost:
// each value that the proxy can name.
func TestEveryNamedLabelBeginsAtZero(t *testing.T) {
	_, _, _, scrape := exposed(t, &backends.Backend{Name: "one"})
	text, named := scrape(), constants(t)
	for of, series := range map[string]string{
		"AbortPhase": "aborts_total{phase", "RetryReason": "retries_total{reason", "RetryEnd": "retry_waits_total{end", "HeldEnd": "hold_ends_total{end",
		"NotLetInFor": "unauthorized_total{reason",
	} {
		if len(named[of]) == 0 {
			t.Errorf("%s has no constants", of)
		}
		for _, value := range named[of] {
			if !strings.Contains(text, "warmroute_"+series+"="+strconv.Quote(value)+"} 0\n") {
				t.Errorf("no %s=%q} at 0", series, value)
			}
		}
	}
}
