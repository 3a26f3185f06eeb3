//go:build !race

package e2e

import (
	"strings"

	"github.com/tidwall/gjson"
)

// jsonShape returns the members and types of a JSON text, one a line: of the elements of a list, those of all together.
func jsonShape(text string) string {
	var b strings.Builder
	seen := map[string]bool{}
	var add func(path string, v gjson.Result)
	add = func(path string, v gjson.Result) {
		kind := strings.ToLower(v.Type.String())
		switch {
		case v.IsObject():
			kind = "object"
		case v.IsArray():
			kind = "list"
		case v.Type == gjson.True || v.Type == gjson.False:
			kind = "boolean"
		}
		if line := "| " + path + " " + kind + "\n"; !seen[line] {
			seen[line] = true
			b.WriteString(line)
		}
		v.ForEach(func(key, value gjson.Result) bool {
			switch {
			case v.IsObject():
				add(path+"."+key.Str, value)
			case v.IsArray():
				add(path+"[]", value)
			}
			return true
		})
	}
	add("", gjson.Parse(text))
	return b.String()
}
