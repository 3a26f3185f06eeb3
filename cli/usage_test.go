package cli

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// writeUsageFile writes a usage file with the rows.
func writeUsageFile(t *testing.T, name string, rows ...string) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), name)
	text := `{"warmroute_usage":1,"compacted":"2026-11-27"}` + "\n" + strings.Join(rows, "\n") + "\n"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestUsageCommand(t *testing.T) {
	a := writeUsageFile(t, "a",
		`{"hour":"2026-11-27T12:00:00Z","key":"team","model":"m","requests":2,"errors":1,"prompt_tokens":100,"cached_tokens":60,`+
			`"output_tokens":10,"queue_seconds":1.5,"saved_prefill_seconds":0.25}`,
		`{"hour":"2026-11-28T12:00:00Z","key":"team","model":"n","requests":1,"prompt_tokens":1}`)
	b := writeUsageFile(t, "b", `{"hour":"2026-11-27T13:00:00Z","key":"team","model":"m","requests":3,"prompt_tokens":50,`+
		`"estimated_tokens":50}`, "damaged")
	escape := writeUsageFile(t, "escape", `{"hour":"2026-11-27T13:00:00Z","key":"","model":"a\u001b[2J\tb\u007f","requests":1}`)
	other := filepath.Join(t.TempDir(), "notes")
	if err := os.WriteFile(other, []byte("notes"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args        string
		out, failed string
	}{
		{a + " " + b, `KEY    MODEL  REQUESTS  ERRORS  PROMPT  CACHED  OUTPUT  ESTIMATED  QUEUE  SAVED
team   m      5         1       150     60      10      50         1.5    0.2
team   n      1         0       1       0       0       0          0.0    0.0
total         6         1       151     60      10      50         1.5    0.2
`, ""},
		{b + " --by model --csv",
			"key,model,requests,errors,prompt_tokens,cached_tokens,output_tokens,estimated_tokens," +
				"estimated_cached_tokens,queue_seconds,saved_prefill_seconds\n,m,3,0,50,0,0,50,0,0.000,0.000\n", ""},
		{a + " --from 2026-11-28 --by key --csv", "team,,1,0,1,", ""},
		{a + " --json", `"rows":[{"key":"team","model":"m","requests":2,`, ""},
		{escape, "\n-      a[2J b  1 ", ""},
		{a + " " + a, "", "are the same file, which would count twice"},
		{a + " --by user", "", `--by: "user" is not key, model, model_name or several of them`},
		{other, "", "is not a usage file of warmroute"},
		{filepath.Join(t.TempDir(), "absent"), "", "no such file"},
	} {
		var out, errOut bytes.Buffer
		cmd := newUsageCommand()
		cmd.SetArgs(strings.Fields(c.args))
		cmd.SetOut(&out)
		cmd.SetErr(&errOut)
		err := cmd.Execute()
		if c.failed != "" {
			if err == nil || !strings.Contains(err.Error(), c.failed) {
				t.Errorf("%s: got %v, want %q", c.args, err, c.failed)
			}
			continue
		}
		if err != nil || !strings.Contains(out.String(), c.out) {
			t.Errorf("%s: %v, got\n%s", c.args, err, out.String())
		}
		if damaged := strings.Contains(errOut.String(), "damaged lines were ignored: 1\n"); damaged != strings.Contains(c.args, b) {
			t.Errorf("%s: stderr %q", c.args, errOut.String())
		}
	}
}
