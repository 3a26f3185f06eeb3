package prompt

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"
)

// TestAgentConversations parses the bodies that agents sent in the three turns of a task, in
// which texts and ids were replaced by others of the same length. In every layout each prompt
// has to extend the one before, although Claude Code moves cache_control and Codex reorders its
// metadata, and must not depend on those, nor on the session and the billing line.
func TestAgentConversations(t *testing.T) {
	// The billing line, the sessions and cache_control.
	ignored := [][2]string{{"cc_version=2.1.197.c0d", "cc_version=2.1.197.fff"}, {"2862803b", "00000000"}, {"511750aa", "00000000"},
		{`,"cache_control":{"type":"ephemeral"}`, ""}}
	for name, kind := range map[string]Kind{"claude-code": Messages, "codex": Responses} {
		for layout := range Layout(1 << numLayoutBits) {
			t.Run(fmt.Sprint(name, layout.BitNames()), func(t *testing.T) {
				var last []byte
				var seed uint64
				for turn := 1; turn <= 3; turn++ {
					raw, err := os.ReadFile(fmt.Sprintf("testdata/agents/%s/turn%d.json", name, turn))
					if err != nil {
						t.Fatal(err)
					}
					body := string(raw)
					p := parseWithLayout(t, kind, body, layout)
					if !p.Cacheable || len(p.Text) < len(body)/2 {
						t.Errorf("turn %d: cacheable %t, %d bytes of prompt", turn, p.Cacheable, len(p.Text))
					}
					if turn > 1 && (!bytes.HasPrefix(p.Text, last) || p.seed != seed) {
						t.Errorf("turn %d does not extend turn %d", turn, turn-1)
					}
					for _, change := range ignored {
						body = strings.ReplaceAll(body, change[0], change[1])
					}
					if other := parseWithLayout(t, kind, body, layout); !bytes.Equal(other.Text, p.Text) || other.seed != p.seed {
						t.Errorf("turn %d: the prompt depends on what vLLM ignores", turn)
					}
					last, seed = p.Text, p.seed
				}
			})
		}
	}
}
