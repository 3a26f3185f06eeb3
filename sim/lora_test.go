package sim

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/tidwall/gjson"
)

func TestAdaptersAreLoadedAndUnloadedWhileItRuns(t *testing.T) {
	s := start(t, Config{Engine: fast, Adapters: []string{"sql"}})
	f := func(path, body string, status int, want string) {
		t.Helper()
		if got, answer := post(t, s, path, body); got != status || !strings.Contains(answer, want) {
			t.Errorf("%s %s: %d %s, want %d and %q", path, body, got, answer, status, want)
		}
	}
	listed := func(want string) {
		t.Helper()
		resp, err := http.Get(s.URL() + "/v1/models")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		cards, _ := io.ReadAll(resp.Body)
		got := ""
		for _, card := range gjson.GetBytes(cards, "data").Array() {
			got += fmt.Sprintf("%s<%s@%s ", card.Get("id").Str, card.Get("parent").Str, card.Get("root").Str)
		}
		if got != want {
			t.Errorf("listed are %s, want %s", got, want)
		}
	}
	ask := func(model string, status int) {
		t.Helper()
		f("/v1/chat/completions", `{"model":"`+model+`","messages":[{"role":"user","content":"Hi"}],"max_tokens":2}`, status, "")
	}
	const load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

	ask("chat", 404)
	f(load, `{"lora_name":"chat","lora_path":"/adapters/chat"}`, 200, "Success: LoRA adapter 'chat' added successfully.")
	ask("chat", 200)
	listed("sim<@/models/sim sql<sim@/models/sql chat<sim@/adapters/chat ")
	f(load, `{"lora_name":"chat","lora_path":"/b"}`, 400, "has already been loaded")
	f(load, `{"lora_name":"chat","lora_path":"/b","load_inplace":true}`, 200, "")
	listed("sim<@/models/sim sql<sim@/models/sql chat<sim@/b ")
	f(load, `{"lora_name":"x"}`, 400, `"type":"InvalidUserInput"`)
	f(unload, `{"lora_name":"sql"}`, 200, "Success: LoRA adapter 'sql' removed successfully.")
	listed("sim<@/models/sim chat<sim@/b ")
	ask("sql", 404)
	f(unload, `{"lora_name":"sql"}`, 404, "The lora adapter 'sql' cannot be found.")
	f(unload, `{}`, 400, "'lora_name'")
	f(unload, `[]`, 400, "")
}
