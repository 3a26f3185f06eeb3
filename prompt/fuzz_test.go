package prompt

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// depth returns how deep the containers of valid JSON nest.
func depth(body []byte) (most int) {
	open, quoted := 0, false
	for i := 0; i < len(body); i++ {
		switch c := body[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '{' || c == '[':
			open++
			most = max(most, open)
		case c == '}' || c == ']':
			open--
		}
	}
	return most
}

// FuzzParse compares our result with encoding/json's. It may differ in four
// ways: ours wants valid UTF-8, an object, and no more than maxDepth levels,
// and takes a byte order mark.
func FuzzParse(f *testing.F) {
	for _, body := range []string{
		pythonRequests, pythonOpenAI, nodeOpenAI, php, "", "{}", "[]", `{"a":[1,-0.5e+3,true,false,null,{"":""}]}`, "\xef\xbb\xbf{}",
		`{"a":"\ud83d\ude00\ud800"}`,
		`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}},"a"]},{"role":"assistant","reasoning":"r",` +
			`"tool_calls":[{"function":{"name":"f","arguments":"{}"}}]}]}`,
		`{"messages":[{"role":"user","content":[{"type":"video_url","video_url":null,"uuid":"u"},{"image_url":null,"uuid":7},` +
			`{"type":"input_audio","input_audio":{"data":"AA"},"uuid":null}]}]}`,
		`{"prompt":[[1,2],[3]]}`, `{"prompt":["a","b"],"n":2}`, `{"prompt":"a","prompt_cache_key":"k","session_id":"s"}`,
		`{"messages":[],"metadata":{"user_id":"user_1_account__session_s"}}`, `{"messages":[],"metadata":{"user_id":"{\"session_id\":\"s\"}"}}`,
		`{"model":1}`, `{"a":1,}`, `{"a" 1}`, "{\"\n:1}", "{\"\t\":1}", "{\"a\n:{\"\n:1}}", `{"a":01}`, `{"a":"` + "\xff" + `"}`,
		`{"a":` + strings.Repeat("[", 600) + strings.Repeat("]", 600) + `}`,
		`{"token_ids":[1,22,333],"sampling_params":{"max_tokens":5,"n":2,"prompt_logprobs":null},"features":{"mm_hashes":{"image":["a"]},` +
			`"kwargs_data":null},"cache_salt":"s"}`,
		`{"token_ids":[4294967296,-1,0.5],"sampling_params":[],"content_parts":[{"type":"image_url","url":"x"}],"features":3}`,
		`{"tools":[{"type":"function","function":{"strict":true,"name":"f"}},3],"messages":[]}`,
		`{"system":[{"type":"text","text":"s"},2],"messages":[{"role":"user","content":[{"type":"tool_result","content":[{"type":"text",` +
			`"text":"o"},{"type":"image","source":{}}]},{"text":"t","type":"text"}]},` +
			`{"role":"assistant","content":[{"type":"thinking","thinking":"r"},{"type":"tool_use","name":"f","input":{"a":1}}]},{"content":"x",` +
			`"role":"system"}],"thinking":{"type":"disabled"},"tools":[{"name":"f","input_schema":{}}]}`,
		`{"input":[{"role":"user","content":"q"},{"type":"reasoning","content":[{"text":"r"}]},{"type":"function_call","name":"f",` +
			`"arguments":"{}"},{"type":"function_call_output","output":"o"},` +
			`{"type":"custom_tool_call","name":"g","input":"i"},{"role":"assistant","content":[{"text":"a"}]}],"instructions":"s",` +
			`"reasoning":{"effort":"low"}}`,
	} {
		f.Add([]byte(body))
	}
	used := new(Prompt)
	f.Fuzz(func(t *testing.T, body []byte) {
		given := slices.Clone(body)
		object := bytes.TrimPrefix(body, []byte("\xef\xbb\xbf"))
		valid := utf8.Valid(body) && json.Valid(object) && bytes.HasPrefix(bytes.TrimLeft(object, " \t\r\n"), []byte("{")) &&
			depth(object) <= maxDepth
		for _, kind := range []Kind{Other, Chat, Completion, Messages, Responses, Generate} {
			var fresh Prompt
			err := fresh.Parse(kind, body)
			if again := used.Parse(kind, body); (again == nil) != (err == nil) {
				t.Fatalf("kind %d: %v, and with a used Prompt %v", kind, err, again)
			}
			if !bytes.Equal(body, given) {
				t.Fatal("the body was changed")
			}
			var refused *Error
			if err != nil && !errors.As(err, &refused) {
				t.Fatalf("kind %d: %v is no *Error", kind, err)
			}
			// An error about a key is one of valid JSON that routing cannot use,
			// or is found before the fault further on.
			if err == nil != valid && (err == nil || refused.Param == "") {
				t.Fatalf("kind %d: %v, but valid is %v", kind, err, valid)
			}
			if err != nil {
				continue
			}
			layout := Layout(len(body)) % (1 << numLayoutBits)
			fresh.ApplyLayout(layout)
			used.ApplyLayout(layout)
			for _, f := range fresh.Forks() {
				if !(f.Without >= 0 && f.Without <= f.WithoutMost && f.WithoutMost <= 1 && f.With >= 0 && f.With <= 1) {
					t.Fatalf("kind %d: fork %+v", kind, f)
				}
			}
			if !bytes.Equal(fresh.Text, used.Text) || fresh.seed != used.seed || head(&fresh) != head(used) {
				t.Fatalf("kind %d: a fresh and a used Prompt differ:\n%s %q\n%s %q", kind, head(&fresh), fresh.Text, head(used), used.Text)
			}
			offset := 0 // of the end of the last media item
			media := fresh.AppendMediaPositions(nil)
			for _, m := range media {
				if m.Offset <= offset || m.Offset+MediaBytes > len(fresh.Text) {
					t.Fatalf("kind %d: media at %d behind %d in %d bytes of prompt", kind, m.Offset, offset, len(fresh.Text))
				}
				offset = m.Offset + MediaBytes
			}
			if class := fresh.TextClass(media); class >= TextClasses {
				t.Fatalf("kind %d: text class %d", kind, class)
			}
			if most := 5*len(body) + maxMedia*MediaBytes; len(fresh.Text) > most {
				t.Fatalf("kind %d: %d bytes of prompt from %d of body", kind, len(fresh.Text), len(body))
			}
		}
	})
}

// slowString is appendString a byte at a time.
func slowString(s *scanner, dst []byte, i int) (_ []byte, end int) {
	for i++; ; {
		switch c := s.byteAt(i); {
		case c == '"':
			return dst, i + 1
		case c == '\\':
			var r rune
			if r, i = s.parseEscape(i); s.err != nil {
				return nil, 0
			}
			dst = utf8.AppendRune(dst, r)
		case c < ' ':
			s.failSyntax(i, "the rest of a string")
			return nil, 0
		default:
			dst = append(dst, c)
			i++
		}
	}
}

// FuzzString holds what we make of a string's escapes against encoding/json,
// and, whatever follows the string, against reading it a byte at a time.
func FuzzString(f *testing.F) {
	long := strings.Repeat("0123456789abcde", 9)
	for _, s := range []string{"", "a", `\"\\\/\b\f\n\r\t`, `\u0041\u00e9\u4e2d\ud83d\ude00`, `\ud800`, `\ud800\ud800\udc00`, `\udc00\u0041`,
		`\ud83d\u`, `\u00g0`, "a\nb",
		long + `\n` + strings.Repeat("x", 40), "中文é\x00", strings.Repeat(`if {\n\t\t`, 30), strings.Repeat(`\\\"`, 30), long + `\n\x` + long,
		long + `\"#` + long + "\x1f" + long} {
		f.Add(s, 0)
		f.Add(s, 33)
		f.Add(s, 100<<8+90)
	}
	f.Fuzz(func(t *testing.T, s string, room int) {
		if !utf8.ValidString(s) {
			return
		}
		literal := []byte(`"` + s + `"`)
		var want string
		valid := json.Unmarshal(literal, &want) == nil
		const before = "before"
		var scan scanner
		copied := func(b []byte) ([]byte, int, error) {
			scan.reset(b)
			got, end := scan.appendString(append(make([]byte, 0, len(before)+room&0xff), before...), 0)
			return got, end, scan.err
		}
		checked := func(b []byte) (int, bool, error) {
			scan.reset(b)
			end, escaped := scan.parseString(0)
			return end, escaped, scan.err
		}
		got, end, err := copied(literal)
		checkedEnd, _, checkErr := checked(literal)
		if (err == nil) != (checkErr == nil) || err == nil && end != checkedEnd {
			t.Fatalf("%s: copied to %d (%v), checked to %d (%v)", literal, end, err, checkedEnd, checkErr)
		}
		if ok := err == nil && end == len(literal); ok != valid {
			t.Fatalf("%s: ends at %d (%v), but valid is %v", literal, end, err, valid)
		}
		if valid && string(got) != before+want {
			t.Fatalf("%s: %q, want %q", literal, got, before+want)
		}
		longer := append(literal, strings.Repeat("\\n\",", 64)[:room>>8&0xff]...)
		scan.reset(longer)
		slow, slowEnd := slowString(&scan, []byte(before), 0)
		slowErr := scan.err
		got, end, err = copied(longer)
		if fmt.Sprint(err) != fmt.Sprint(slowErr) || err == nil && (end != slowEnd || !bytes.Equal(got, slow)) {
			t.Fatalf("%s: %q to %d (%v), a byte at a time %q to %d (%v)", longer, got, end, err, slow, slowEnd, slowErr)
		}
		end, escaped, err := checked(longer)
		if fmt.Sprint(err) != fmt.Sprint(slowErr) || err == nil && (end != slowEnd || escaped != bytes.Contains(longer[:end], []byte(`\`))) {
			t.Fatalf("%s: checked to %d (%v, escaped %v), a byte at a time to %d (%v)", longer, end, err, escaped, slowEnd, slowErr)
		}
	})
}

// FuzzResponse gives any bytes for an event of a response: they become at most as
// much text, and how often a Response was used makes no difference.
func FuzzResponse(f *testing.F) {
	for _, event := range []string{
		`{"choices":[{"index":0,"delta":{"role":"assistant","content":"a\u0301 \ud83d\ude00"}}]}`,
		`{"choices":[{"message":{"content":"x","tool_calls":[]}}]}`,
		`{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"name":"f","arguments":"{\"a\": 1}"}},{"index":1,` +
			`"function":{"arguments":"x"}}]}}]}`,
		`{"type":"content_block_start","content_block":{"type":"tool_use","name":"f","input":{}}}`,
		`{"type":"content_block_delta","delta":{"partial_json":"{}","text":"x"}}`,
		`{"type":"response.output_item.done","item":{"type":"function_call","name":"f","arguments":"{}"}}`,
		`{"type":"response.output_text.delta","delta":"x"}`,
		`{"content":[{"type":"text","text":"x"},{"type":"tool_use"}],"output":[{"type":"message","content":[{"type":"output_text","text":"y"}]}` +
			`]}`,
		`{"choices":[{"text":"x"}]}`, `{"choices":[{"token_ids":[1,22,-3,4294967296]}]}`, `{"choices":[{"token_ids":null}]}`,
		`{"choices":[[]],"x":{"y":[1]}}`, `{"ch\u006fices":[{"delta":{"content":null}}]}`, `{`, ``, "\xff", `{"choices":[{"delta":`,
	} {
		f.Add([]byte(event))
	}
	var prompts []*Prompt
	for kind, body := range map[Kind]string{Chat: `{"messages":[{"role":"user","content":"q"}]}`, Completion: `{"prompt":"q"}`,
		Messages: `{"messages":[{"role":"user","content":"q"}]}`, Responses: `{"input":"q"}`, Generate: `{"token_ids":[1,2,3]}`} {
		p, _ := blocksOf(f, kind, []byte(body), 64)
		prompts = append(prompts, p)
	}
	used := new(Response)
	f.Fuzz(func(t *testing.T, event []byte) {
		for _, p := range prompts {
			fresh := new(Response)
			fresh.Reset(endOf(p))
			used.Reset(endOf(p))
			before := len(fresh.text)
			for range 3 {
				fresh.AddEvent(event)
				used.AddEvent(event)
				fresh.AddBody(event)
				used.AddBody(event)
			}
			if !slices.Equal(fresh.Finish(), used.Finish()) || !bytes.Equal(fresh.text, used.text) {
				t.Fatal("a fresh and a used Response differ")
			}
			if n := len(fresh.text) + 64*len(fresh.blocks); n > before+12*len(event) {
				t.Fatalf("%d bytes of text from %d of events", n-before, 6*len(event))
			}
		}
	})
}
