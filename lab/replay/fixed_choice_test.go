package replay

import (
	"bytes"
	"strings"
	"testing"
)

func TestWriteFixedChoices(t *testing.T) {
	report := func(figures map[string]float64) (r Report) {
		for _, name := range []string{ownRule, "smg", "weighted", "random", Pooled} {
			if x, played := figures[name]; played {
				r.Results = append(r.Results, Summary{Policy: name, Requests: 1, E2EMean: x, TTFTMean: x / 2, TTFTLongest: 1, TTFTP99: 1,
					Throughput: 1})
			}
		}
		return r
	}
	write := func(reports ...Report) string {
		t.Helper()
		var out bytes.Buffer
		if err := WriteFixedChoices(&out, reports); err != nil {
			t.Fatal(err)
		}
		return out.String()
	}
	// Best of all in hindsight would be 1 and 1; smg is chosen for both, or weighted is.
	out := write(report(map[string]float64{ownRule: 1, "smg": 1, "weighted": 4, "random": 9, Pooled: 1}),
		report(map[string]float64{ownRule: 1, "smg": 4, "weighted": 1.5625, Pooled: 1}))
	var got []string
	for line := range strings.Lines(out) {
		if f := strings.Fields(line); len(f) > 2 && !strings.HasPrefix(line, ownRule) {
			got = append(got, strings.Join(f[:len(f)-3], " "))
		}
	}
	want := "weighted 0.400 0.400, smg 0.500 0.500, least favourable 0.500 0.500"
	if strings.Join(got, ", ") != want {
		t.Errorf("got %q, want %q, in\n%s", got, want, out)
	}
	if out := write(report(map[string]float64{"smg": 1})); out != "" {
		t.Errorf("without prefix: %q", out)
	}
	if out := write(); out != "" {
		t.Errorf("without reports: %q", out)
	}
}
