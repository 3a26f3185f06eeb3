package config

import (
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"warmroute/prompt"
	"warmroute/proxy/modelname"
)

func TestModelNames(t *testing.T) {
	c := mustLoad(t, `
models:
  patterns: {"sql-*": base}
  names:
    - {name: gpt-4o, model: Org/Qwen3.1-32B}
    - name: Coder.V1
      models: [coder-v2, coder-v1]
      fallback_after: 0s
      set:
        temperature: 0.2
        stop: ~
        n: 18446744073709551615
        chat_template_kwargs: {enableThinking: false, a.b: [{C.D: "<x>"}, {}, [1]], "": ""}
      max_output_tokens: 8192
    - {name: trial, models: [coder-v2, coder-v1], weights: [1, 9], set: {}}
keys: [{name: k, sha256: "`+strings.Repeat("0a", 32)+`", models: [Coder.V1]}]
`, "http://a:8000")
	want := []modelname.Settings{
		{Name: "gpt-4o", Models: []string{"Org/Qwen3.1-32B"}, FallbackAfter: 20 * time.Second},
		{Name: "Coder.V1", Models: []string{"coder-v2", "coder-v1"}, MaxOutputTokens: 8192, Set: []prompt.Member{
			{Name: "chat_template_kwargs", Value: `{"":"","a.b":[{"C.D":"<x>"},{},[1]],"enableThinking":false}`},
			{Name: "n", Value: "18446744073709551615"}, {Name: "stop", Value: "null"}, {Name: "temperature", Value: "0.2"},
		}},
		{Name: "trial", Models: []string{"coder-v2", "coder-v1"}, Weights: []int{1, 9}, FallbackAfter: 20 * time.Second},
	}
	if got := c.ProxySettings(0, 0).ModelNames; !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestModelNameErrors(t *testing.T) {
	for _, c := range []struct{ yaml, want string }{
		{"{name: a}", "models.names[0]: has no model; set model, or models"},
		{"{model: m}", "models.names[0].name: is missing; give the name by which clients ask for the model"},
		{"a", "models.names[0]: expected a mapping with name and model, got a string"},
		{"{name: a, Model: m}", `models.names[0]: unknown key "Model"; did you mean model?`},
		{"{name: a, model: ~}", "models.names[0]: model has no value; give it one or delete the line"},
		{"{name: a, model: m, models: [n]}", "models.names[0]: has both model and models; remove one of the two"},
		{"{name: a, models: []}", "models.names[0]: has no model; set model, or models"},
		{`{name: a, models: [m, ""]}`, "models.names[0].models[1]: is empty; name a model of the replicas"},
		{"{name: a, models: [m, m]}", "models.names[0].models[1]: m is given twice; remove one of the two"},
		{"{name: a, model: a}", "models.names[0].model: a is a name of models.names itself; name the model that it stands for"},
		{"{name: a, model: b}, {name: b, model: a}",
			"models.names[0].model: b is a name of models.names itself; name the model that it stands for\n" +
				"models.names[1].model: a is a name of models.names itself; name the model that it stands for"},
		{"{name: a, model: m}, {name: a, model: n}", "models.names[1].name: a is already models.names[0]; remove one of the two"},
		{"{name: hooked, model: m}", "models.names[0].name: hooked is a model itself, by start_hooks; choose another name"},
		{"{name: base, model: m}", "models.names[0].name: base is a model itself, by models.patterns; choose another name"},
		{"{name: sql-a, model: m}", `models.names[0].name: sql-a is an adapter by the pattern "sql-*" in models.patterns; choose another name`},
		{"{name: ' a', model: m}", `models.names[0].name: " a" must be visible ASCII, without spaces at its ends`},
		{"{name: a, models: [m, n], weights: [1]}", "models.names[0].weights: has 1 weights for 2 models; give each of models one"},
		{"{name: a, models: [m, n], weights: [0, 0]}", "models.names[0].weights: are all 0; give at least one of models another weight"},
		{"{name: a, models: [m, n], weights: [-1, 2]}", "models.names[0].weights[0]: -1 is not between 0 and 1000000"},
		{"{name: a, models: [m, n], weights: [0.5, 2]}", "models.names[0].weights[0]: expected an integer, got a decimal number"},
		{"{name: a, models: [m, n], fallback_after: 2h}", "models.names[0].fallback_after: 2h0m0s is too long; the maximum is 1h0m0s"},
		{"{name: a, model: m, max_output_tokens: -1}", "models.names[0].max_output_tokens: -1 is too small; the minimum is 0"},
		{"{name: a, model: m, set: [1]}", "models.names[0].set: expected a mapping such as {temperature: 0.2}, got a list"},
		{"{name: a, model: m, set: {model: n}}", "models.names[0].set.model: is set by model and models; remove it here"},
		{"{name: a, model: m, set: {stream: true}}", "models.names[0].set.stream: is the client's to set; remove it"},
		{"{name: a, model: m, set: {kv_transfer_params: {}}}", "models.names[0].set.kv_transfer_params: is the client's to set; remove it"},
		{"{name: a, model: m, set: {max_tokens: 1}, max_output_tokens: 2}",
			"models.names[0].set.max_tokens: is limited by max_output_tokens; remove one of the two"},
		{"{name: a, model: m, set: {a b: 1}}", `models.names[0].set: "a b" is not the name of a member such as temperature`},
		{"{name: a, model: m, set: {x: .inf}}", "models.names[0].set: x: JSON has no infinity and no NaN"},
		{"{name: a, model: m, set: {x: [2027-01-01]}}", "models.names[0].set: x: a date has to be in quotes"},
		{"{name: a, model: m, set: {x: {1: 2}}}", "models.names[0].set: x: the keys of a mapping have to be strings; put them in quotes"},
	} {
		_, err := load(t, "start_hooks: [{model: hooked, url: http://s/x}]\nmodels:\n  patterns: {\"sql-*\": base}\n  names: ["+c.yaml+"]\n",
			"http://a:8000")
		if err == nil || err.Error() != c.want {
			t.Errorf("%s: got  %v\nwant %s", c.yaml, err, c.want)
		}
	}
	t.Setenv("WARMROUTE_MODELS_NAMES", "a")
	const want = "expected a mapping with name and model, got a string"
	if _, err := load(t, "", "http://a:8000"); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("from the environment: %v", err)
	}
}

func TestFallbackWarnings(t *testing.T) {
	const names = "models: {names: [{name: a, model: m}, {name: b, models: [m, n]}, {name: c, models: [m, n], fallback_after: 0s}, " +
		"{name: d, models: [m, n], fallback_after: 1m}]}\n"
	for more, want := range map[string]string{
		"": "models.names[3].fallback_after: 1m0s is not below routing.queue.none_ready_timeout 1m0s",
		"routing: {queue: {requests: 0}}": "models.names[1].fallback_after: 20s while the admission queue is off|" +
			"models.names[3].fallback_after: 1m0s while the admission queue is off",
		"routing: {queue: {none_ready_timeout: 5m}}": "",
	} {
		c := mustLoad(t, names+more, "http://a:8000")
		var got []string
		for _, w := range c.fallbackWarnings() {
			before, _, _ := strings.Cut(w, " (routing")
			before, _, _ = strings.Cut(before, ": requests")
			got = append(got, before)
			if !slices.Contains(c.Warnings(testLoader.Policies), w) {
				t.Errorf("%q: not among the warnings: %s", more, w)
			}
		}
		if strings.Join(got, "|") != want {
			t.Errorf("%q: got %q, want %q", more, got, want)
		}
	}
}
