package cli

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"warmroute/lab/sim/engine"
	"warmroute/router/step"
)

func TestReadStep(t *testing.T) {
	good, err := json.Marshal(step.Default())
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ name, text, want string }{
		{"as explain prints it", string(good), ""},
		{"no object", "[]", "is not a JSON object"},
		{"another object", `{"base_ms":5}`, "unknown field"},
		{"no rate", strings.Replace(string(good), "38500", "0", 1), "prompt_tokens_per_second 0 is not between"},
		{"less than nothing", strings.Replace(string(good), "0.00507", "-1", 1), "-1 is not above 0"},
		{"empty", "", "is not a JSON object"},
	} {
		path := filepath.Join(t.TempDir(), "step.json")
		if err := os.WriteFile(path, []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		e, err := readStep(path, engine.Config{StepTokens: 100})
		if c.want == "" && (err != nil || e.StepTime != 5070*time.Microsecond || e.PrefillRate != 38_500 || e.DecodeTime != 5*time.Microsecond ||
			e.ContextTime != 22*time.Nanosecond || e.PromptTokenTime != 1700*time.Nanosecond || e.QuadraticDepth != 2.8e-5 || e.StepTokens != 100) {
			t.Errorf("%s: %+v, %v", c.name, e, err)
		}
		if c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: error %v, want %q", c.name, err, c.want)
		}
	}
	if _, err := readStep(filepath.Join(t.TempDir(), "absent"), engine.Config{}); err == nil {
		t.Error("no error for a file that does not exist")
	}
}
