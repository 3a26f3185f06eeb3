package prompt

import (
	"encoding/base64"
	"math/rand/v2"
	"strings"
	"testing"
)

func TestTextClass(t *testing.T) {
	random := make([]byte, 30_000)
	for i, r := 0, rand.New(rand.NewPCG(1, 1)); i < len(random); i++ {
		random[i] = byte(r.Uint32())
	}
	chinese := strings.Repeat("前缀缓存命中时，请求不需要再次预填充。", 500)
	script := func(kind byteKind, level TextClass) TextClass {
		return firstScriptClass + TextClass(kind-firstScript)*scriptLevels + level
	}
	prose := firstASCIIClass + asciiLevels - 1
	for _, c := range []struct {
		name, text string
		want       TextClass
		latin      bool
	}{
		{"English", english, prose, true},
		{"long English", repeat(english, 300_000), prose, true},
		{"English with a name", repeat(english, 20_000) + "Zoë", prose, true},
		{"English with dashes", strings.ReplaceAll(repeat(english, 20_000), " ", "—"), prose - 3, true},
		{"JSON", strings.Repeat(`{"id":1234,"name":"user_1","score":17}`, 100), firstASCIIClass + 3, true},
		{"base64", base64.StdEncoding.EncodeToString(random), firstASCIIClass + 3, true},
		{"numbers", strings.Repeat("12.5,17,", 500), firstASCIIClass, true},
		{"French", strings.Repeat("La commission siégeait depuis le petit matin, et le président demanda enfin un vote. ", 300), script(latin, 0),
			true},
		{"Vietnamese", strings.Repeat("Ủy ban đã họp từ sáng sớm, và không ai nhớ. ", 300), script(latin, 1), true},
		{"Greek", strings.Repeat("Η επιτροπή συνεδρίαζε από νωρίς το πρωί. ", 300), script(greek, 3), false},
		{"Russian", strings.Repeat("Комиссия заседала с раннего утра. ", 300), script(cyrillic, 3), false},
		{"Arabic", strings.Repeat("كانت اللجنة مجتمعة منذ الصباح الباكر. ", 300), script(semitic, 3), false},
		{"Hindi", strings.Repeat("समिति सुबह से बैठक कर रही थी। ", 300), script(indic, 3), false},
		{"Chinese", chinese, script(cjk, 3), false},
		{"Korean", strings.Repeat("위원회는 이른 아침부터 회의를 하고 있었다. ", 300), script(hangul, 3), false},
		{"half Chinese", repeat(english, len(chinese)) + chinese, script(cjk, 1), false},
		{"a little Chinese", repeat(english, 9*len(chinese)) + chinese, script(cjk, 0), true},
	} {
		p := parse(t, Completion, string(marshal(t, map[string]string{"model": "m", "prompt": c.text})))
		if got := p.TextClass(nil); got != c.want || got.IsLatin() != c.latin {
			t.Errorf("%s: class %d, Latin %v; want %d, %v", c.name, got, got.IsLatin(), c.want, c.latin)
		}
	}
	const image = `{"type":"image_url","image_url":{"url":"a"}}`
	for _, c := range []struct {
		content string
		want    TextClass
	}{
		{image, noText},
		{image + `,"` + chinese + `"`, script(cjk, 3)},
		{`"` + chinese + `",` + image + "," + image, script(cjk, 3)},
		{image + `,"The committee had been in session since the early morning.",` + image, prose},
	} {
		p := parse(t, Chat, `{"messages":[{"role":"user","content":[`+c.content+`]}]}`)
		if got := p.TextClass(p.AppendMediaPositions(nil)); got != c.want {
			t.Errorf("class %d, want %d: %.80s", got, c.want, c.content)
		}
	}
	if got := parse(t, Completion, `{"model":"m","prompt":[1,2,3]}`).TextClass(nil); got != TokenIDs {
		t.Errorf("token ids: class %d", got)
	}
	if got := parse(t, Completion, `{"model":"m","prompt":""}`).TextClass(nil); got != noText {
		t.Errorf("no text: class %d", got)
	}
}
