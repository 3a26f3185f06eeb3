package vllm

import (
	"strings"
	"testing"
)

// vllmModels is what vLLM responds at a given second, cards apart.
func vllmModels(created, permission string, cards ...string) string {
	list := make([]string, len(cards))
	for i, c := range cards {
		list[i] = `{` + c + `,"object":"model","created":` + created + `,"owned_by":"vllm","permission":[{"id":"` + permission + `"}]}`
	}
	return `{"object":"list","data":[` + strings.Join(list, ",") + `]}`
}

func TestParseModels(t *testing.T) {
	models, err := ParseModels([]byte(`{"data":[ {"id":"m", "root":"/m" ,"parent":null,"new_field":[1]} , {"id":"fr","parent":"m"}]}`))
	if err != nil || len(models) != 2 {
		t.Fatal(models, err)
	}
	if got := string(models[0].Card); got != `{"id":"m", "root":"/m" ,"parent":null,"new_field":[1]}` {
		t.Errorf("card is %s", got)
	}
	if m := models[0]; m.ID != "m" || m.Root != "/m" || m.Parent != "" || models[1].Parent != "m" {
		t.Errorf("%+v", models)
	}
}

func TestEqualModels(t *testing.T) {
	list := func(created, permission, card string) []Model {
		models, err := ParseModels([]byte(vllmModels(created, permission, card)))
		if err != nil {
			t.Fatal(err)
		}
		return models
	}
	first := list("1", "modelperm-a", `"id":"m","max_model_len":10`)
	if !EqualModels(first, list("2", "modelperm-b", `"id":"m","max_model_len":10`)) {
		t.Error("a new time and a new permission id count as a change")
	}
	for _, other := range []string{`"id":"m","max_model_len":20`, `"id":"n","max_model_len":10`, `"id":"m","max_model_len":10,"x":1`} {
		if EqualModels(first, list("1", "modelperm-a", other)) {
			t.Errorf("%s does not count as a change", other)
		}
	}
}

func TestParseInvalidModels(t *testing.T) {
	for _, body := range []string{
		``, `not json`, `[]`, `{"data":{}}`, `{"data":[1]}`, `{"data":[{}]}`, `{"data":[{"id":7}]}`, `{"data":[null]}`,
		strings.Repeat("[", 1<<20), `{"data":` + strings.Repeat("[", 1<<20),
	} {
		if models, err := ParseModels([]byte(body)); err == nil {
			t.Errorf("%.30q: %v", body, models)
		}
	}
}

func TestModelMaxTokens(t *testing.T) {
	for written, want := range map[string]int{
		`131072`: 131072, `1e5`: 100_000, `null`: 0, `0`: 0, `-1`: 0, `1e300`: 0, `1e999`: 0, `"long"`: 0, `[1]`: 0, `2000000000`: 0,
	} {
		models, err := ParseModels([]byte(`{"data":[{"id":"m","max_model_len":` + written + `}]}`))
		if err != nil || len(models) != 1 || models[0].MaxTokens != want {
			t.Errorf("%s: %+v, %v; want %d", written, models, err, want)
		}
	}
}

func TestHaveSameBaseModels(t *testing.T) {
	a, b, adapter := Model{ID: "a"}, Model{ID: "b"}, Model{ID: "lora", Parent: "a"}
	for _, c := range []struct {
		before, after []Model
		want          bool
	}{
		{[]Model{a}, []Model{a}, true},
		{[]Model{a}, []Model{a, adapter}, true},
		{[]Model{a, b}, []Model{adapter, b, a}, true},
		{[]Model{a}, []Model{b}, false},
		{[]Model{a}, []Model{a, b}, false},
	} {
		if got := HaveSameBaseModels(c.before, c.after); got != c.want {
			t.Errorf("%v, %v: %v", c.before, c.after, got)
		}
	}
}
