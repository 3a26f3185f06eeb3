//go:build browser

package e2e

import (
	"fmt"
	"net/http"
	"path/filepath"
	"testing"
)

func TestPageShowsUsage(t *testing.T) {
	proxy := startPage(t, "usage: {file: "+filepath.Join(t.TempDir(), "usage")+"}")
	for range 3 {
		if err := askStream(http.DefaultClient, proxy.url, "the same words", 3, func() {}); err != nil {
			t.Fatal(err)
		}
	}
	page := openPage(t, proxy.admin)
	const row = "#usage tbody tr"
	page.until(`document.querySelectorAll('` + row + `').length === 1 && document.querySelector('` + row +
		`').innerText.includes('without a key')`)
	page.until(`document.querySelector('#usage-saved').innerText.startsWith('Of ') && ` +
		`document.querySelector('#usage-count').innerText.startsWith('since ')`)
	for id, value := range map[string]string{"usage-by": "model", "usage-period": "all"} {
		evaluate[bool](page, fmt.Sprintf(`byId(%q).value = %q, byId(%[1]q).dispatchEvent(new Event('change'))`, id, value))
	}
	page.until(`document.querySelectorAll('` + row + `').length === 1 && document.querySelector('` + row + `').innerText.includes('sim')`)
}
